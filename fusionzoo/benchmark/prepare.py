"""Before any strategy trains: the data, its folds, its encoders, and in probe mode their features.

What comes of it, a `Bench`, is all that a cell needs; it goes to worker processes as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from fusionzoo.config import BenchmarkConfig, from_tree, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.splits import SPLITS
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import CORRUPTIONS, SEVERITIES, Corrupted
from fusionzoo.fusion import create_fusion
from fusionzoo.model import FusionModel
from fusionzoo.places import cache_root, make_cache_folder
from fusionzoo.structures import Batch
from fusionzoo.training import checkpoint
from fusionzoo.training.deselected import drop_deselected
from fusionzoo.training.distributed import World, pick_device, seed_everything
from fusionzoo.training.loop import num_workers
from fusionzoo.training.run import choose_encoders, open_dataset

from .cache import FeatureCache
from .engines import work
from .features import Stored, describe, encode, fingerprint, key_of
from .fit import Given, Single, fit

Condition = tuple[str, str, int]  # modality, corruption, severity
Description = dict[str, Any]  # of a cache entry


@dataclass(frozen=True, eq=False)  # tensors have no truth value to compare by
class Fold:
    """Rows of the data set."""

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True)
class Bench:
    """The data of a benchmark, ready to train on; small, for features stay in their files."""

    cfg: BenchmarkConfig
    modalities: dict[str, str]
    classes: list[str]
    targets: Tensor  # (N,)
    present: Tensor  # (N, M)
    folds: list[Fold]
    dims: dict[str, int] = field(default_factory=dict)
    features: list[dict[str, Description]] = field(default_factory=list)  # by fold, of all rows
    corrupted: list[dict[Condition, Description]] = field(default_factory=list)  # of test rows
    notes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # (N,) names; samples of one stay together

    def stored(self, description: Description) -> Stored:
        """Map features into memory."""
        found = feature_cache().load(description)
        if found is None:
            raise FusionZooError(
                f"features {key_of(description)} are gone from {feature_cache().root}:"
                " run again to make them anew"
            )
        return found


def feature_cache() -> FeatureCache:
    """Return the cache in $FUSIONZOO_CACHE, else in ~/.cache/fusionzoo."""
    return FeatureCache(cache_root() / "features")


def open_bench(cfg: BenchmarkConfig) -> tuple[Bench, PairedDataset]:
    """Open the data and deal it out; nothing is computed yet."""
    dataset = open_dataset(cfg.data)
    cfg, dropped = drop_deselected(cfg, dataset.provenance.deselected)
    if not dataset.classes:
        raise FusionZooError(f"{dataset.source} has no target column, and a benchmark needs one")
    if len(dataset.modalities) < 2:
        raise FusionZooError(f"{dataset.source} has one modality: there is nothing to fuse")
    folds = make_folds(dataset, cfg.folds, cfg.seed)
    bench = Bench(
        cfg,
        dataset.modalities,
        dataset.classes,
        dataset.targets,
        dataset.present,
        folds,
        groups=dataset.groups,
    )
    if dropped:
        bench.notes.append(f"Settings left out by --data.modalities: {', '.join(dropped)}.")
    return bench, dataset


def make_folds(dataset: PairedDataset, count: int, seed: int) -> list[Fold]:
    """Return the data's own split, or `count` stratified folds that keep its groups together.

    Of fold f, f is the test split, the next one is for validation, the rest is trained on.
    """
    if count == 0:
        names = dataset.split_names
        for name in SPLITS:
            if name not in names:
                dataset.split(name)  # says what there is
        rows = {
            name: torch.tensor([row for row, own in enumerate(names) if own == name])
            for name in SPLITS
        }
        return [Fold(**rows)]
    if count < 3:
        raise FusionZooError(
            f"--folds {count}: one to test, one to validate and one to train make 3"
        )
    from sklearn.model_selection import StratifiedGroupKFold

    dealer = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    dealt = dealer.split(dataset.ids, dataset.targets, dataset.groups)
    parts = [torch.from_numpy(part) for _, part in dealt]
    folds = []
    for number, test in enumerate(parts):
        val = parts[(number + 1) % count]
        rest = [p for other, p in enumerate(parts) if other not in (number, (number + 1) % count)]
        folds.append(Fold(torch.cat(rest).sort().values, val, test))
    for number, fold in enumerate(folds):
        known = set(dataset.targets[fold.train].tolist())
        for row in torch.cat([fold.val, fold.test]).tolist():
            if int(dataset.targets[row]) not in known:
                label = dataset.labels[row]
                raise FusionZooError(
                    f"fold {number}: no training sample has the label {label!r};"
                    " fewer folds, or more samples of it"
                )
    return folds


def build_encoders(cfg: BenchmarkConfig, dataset: PairedDataset) -> dict[str, Encoder]:
    """Build the encoders of the data set or of the recipe."""
    seed_everything(cfg.seed)
    built = {}
    for modality, given in choose_encoders(dataset, cfg.encoders).items():
        if modality not in dataset.modalities:
            dataset.select(modality)  # names what there is
        name, settings = split_name(given, f"encoders.{modality}")
        built[modality] = create_encoder(
            modality, name, **{"kind": dataset.modalities[modality], **settings}
        )
    return {name: built[name] for name in dataset.modalities}


def prepare(bench: Bench, dataset: PairedDataset, tokens: bool) -> None:
    """Fill in widths and, in probe mode, the features of every fold."""
    encoders = build_encoders(bench.cfg, dataset)
    bench.dims.update({name: encoder.dim for name, encoder in encoders.items()})
    if bench.cfg.mode == "finetune":
        bench.notes.append("Encoders were trained end to end, anew for every strategy and seed.")
        return
    for number, fold in enumerate(bench.folds):
        frozen = {name: freeze(bench, dataset, number, one) for name, one in encoders.items()}
        whole = {name: about(bench, dataset, one, tokens) for name, one in frozen.items()}
        test = dataset.subset(fold.test)
        part = {n: {**one, "samples": fingerprint(test, n)} for n, one in whole.items()}
        for name, encoder in frozen.items():
            for view in range(bench.cfg.views):
                store(bench, dataset, encoder, {**whole[name], "view": view}, progress=True)
        bench.features.append({name: {**one, "view": 0} for name, one in whole.items()})
        bench.corrupted.append(
            {
                one: {**part[one[0]], "corruption": one[1:], "fold": number}
                for one in conditions(bench)
            }
        )
    todo = [
        (number, condition)
        for number, found in enumerate(bench.corrupted)
        for condition, described in found.items()
        if not feature_cache().has(described)
    ]
    for _ in work(bench.cfg, bench, todo, encode_damage, "encode damage"):
        pass


def encode_damage(bench: Bench, piece: tuple[int, Condition]) -> None:
    """Encode the test samples of a fold, one modality damaged."""
    number, condition = piece
    dataset, frozen = _frozen(json.dumps(asdict(bench.cfg)), number)
    test = Corrupted(dataset.subset(bench.folds[number].test), *condition)
    store(bench, test, frozen[condition[0]], bench.corrupted[number][condition], progress=False)


@lru_cache(maxsize=1)
def _frozen(settings: str, fold: int) -> tuple[PairedDataset, dict[str, Encoder]]:
    """Build data and encoders once for each process; what was trained alone is on disk by now."""
    bench, dataset = open_bench(from_tree(BenchmarkConfig, json.loads(settings)))
    encoders = build_encoders(bench.cfg, dataset)
    frozen = {name: freeze(bench, dataset, fold, one) for name, one in encoders.items()}
    return dataset, frozen


def conditions(bench: Bench) -> list[Condition]:
    """Return every damage that is tested."""
    if not bench.cfg.corruptions:
        return []
    return [
        (modality, name, severity)
        for modality, kind in bench.modalities.items()
        for name in CORRUPTIONS[kind]
        for severity in SEVERITIES
    ]


def about(bench: Bench, dataset: PairedDataset, encoder: Encoder, tokens: bool) -> Description:
    """Describe an encoder's features of a data set."""
    # Where no strategy reads tokens, one per sample says that the modality is there.
    most = bench.cfg.max_tokens.get(encoder.modality) if tokens else 1
    return describe(encoder, dataset, max_tokens=most, precision=bench.cfg.precision)


def store(
    bench: Bench, dataset: PairedDataset, encoder: Encoder, described: Description, progress: bool
) -> None:
    """Make sure that features are in the cache."""
    feature_cache().get(
        described,
        lambda: encode(
            encoder,
            dataset,
            num_workers=workers(bench.cfg),
            max_tokens=described["max_tokens"],
            dtype=torch.bfloat16 if bench.cfg.precision == "bf16" else torch.float32,
            view=described.get("view", 0),
            device=device(bench.cfg),
            progress=progress,
        ),
    )


# ---- encoders that nobody trained before


def freeze(bench: Bench, dataset: PairedDataset, number: int, encoder: Encoder) -> Encoder:
    """Freeze an encoder; one without pretrained weights is first trained alone on a fold."""
    frozen = copy.deepcopy(encoder)
    if not untrained(encoder):
        frozen.freeze()
        return frozen
    cfg, name, fold = bench.cfg, encoder.modality, bench.folds[number]
    has = bench.present[:, list(bench.modalities).index(name)]
    train, val = fold.train[has[fold.train]], fold.val[has[fold.val]]
    if not len(train) or not len(val):
        raise FusionZooError(f"{name}: its encoder has no weights, and no sample to learn from")
    key = describe(encoder, dataset, trained_on=train.tolist(), judged_on=val.tolist())
    key |= {"epochs": cfg.encoder_epochs, "batch_size": cfg.batch_size, "seed": alone_seed(cfg)}
    key |= {"optim": asdict(cfg.optim)}
    path = make_cache_folder(cache_root() / "weights") / f"{key_of(key)}.pt"
    if path.is_file():
        kept = checkpoint.read(path)
        frozen.load_state_dict(kept["weights"])
        accuracy = kept["accuracy"]
    else:
        bar = tqdm(total=cfg.encoder_epochs, desc=f"train {name} alone", unit="epoch")
        accuracy = train_alone(bench, dataset, frozen, train, val, bar)
        bar.close()
        checkpoint.write({"weights": frozen.state_dict(), "accuracy": accuracy}, path)
    where = f" (fold {number})" if bench.cfg.folds else ""
    bench.notes.append(
        f"{name}{where}: {encoder.spec['name']} has no pretrained weights; it was trained alone on"
        f" {len(train)} training samples ({cfg.encoder_epochs} epochs, the best kept by validation"
        f" loss, accuracy there {accuracy:.3f}), then frozen."
    )
    frozen.freeze()
    return frozen


def untrained(encoder: Encoder) -> bool:
    """Whether an encoder has parameters that nothing has trained."""
    spec = encoder.spec
    given = spec.get("weights") is not None or spec.get("pretrained") is True
    return any(True for _ in encoder.parameters()) and not given


def alone_seed(cfg: BenchmarkConfig) -> int:
    """Return a seed that no strategy has.

    An encoder's features fit the head that it was trained under. A strategy whose head started from
    the same weights would know the labels before it sees any, even shuffled ones.
    """
    return crc32(f"encoders alone, {cfg.seed}".encode())


def train_alone(
    bench: Bench, dataset: PairedDataset, encoder: Encoder, train: Tensor, val: Tensor, bar: Any
) -> float:
    """Train one encoder under a linear head, keep its best epoch; return the accuracy there."""
    cfg = replace(bench.cfg, epochs=bench.cfg.encoder_epochs, patience=None)
    seed_everything(alone_seed(cfg))
    name = encoder.modality
    head = create_fusion("concat", {name: encoder.dim}, encoder.dim, len(bench.classes), hidden=())
    model = FusionModel({name: encoder}, head, {}, bench.classes)
    feed = BatchFeed(dataset.only(name), model, cfg)

    def told(chunks: Sequence[Tensor], epoch: int) -> Iterator[Given]:
        bar.update(epoch >= 0)
        return feed(chunks, epoch)

    model.to(device(cfg))
    targets = bench.targets.to(device(cfg))
    (best,) = fit(Single(model, cfg, targets[train]), told, targets, train, val, [cfg.seed])
    model.load_state_dict(best.weights)
    model.eval()
    with torch.no_grad():
        right = [
            (model(given).logits.argmax(-1) == targets[rows]).double()
            for rows, given in zip(val.split(256), feed(val.split(256), -1), strict=True)
            if isinstance(given, Batch)
        ]
    return float(torch.cat(right).mean())


class BatchFeed:
    """Batches of prepared samples; vectors are collated once, the rest is loaded each time."""

    def __init__(self, dataset: PairedDataset, model: FusionModel, cfg: BenchmarkConfig) -> None:
        self.dataset, self.model, self.cfg = dataset, model, cfg
        self.whole: Batch | None = None
        if set(dataset.modalities.values()) == {"vector"}:
            whole: Batch = model.collate()([dataset[row] for row in range(len(dataset))])
            self.whole = whole.to(device(cfg))

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each chunk of rows; in training a sample's seed is new each epoch."""
        if self.whole is not None:
            for rows in chunks:
                yield self.whole.take(rows)
            return
        base = (epoch + 1) * len(self.dataset)  # 0 in evaluation: no augmentation
        loader: Any = DataLoader(
            self.dataset,
            batch_sampler=[
                [(row, 1 + base + row if base else 0) for row in rows.tolist()] for rows in chunks
            ],
            collate_fn=self.model.collate(train=epoch >= 0),
            num_workers=workers(self.cfg),
        )
        yield from (batch.to(device(self.cfg)) for batch in loader)


def workers(cfg: BenchmarkConfig) -> int:
    """Return how many processes load."""
    return num_workers(cfg.num_workers, World())


def device(cfg: BenchmarkConfig) -> torch.device:
    """Return where encoders run."""
    return pick_device(cfg.device)
