"""The model: encoders and a fusion, joined; train it, save it, give it raw samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusionzoo.config import split_name
from fusionzoo.encoders import Encoder, adopt, create_encoder, origin_of, shared_checkpoints
from fusionzoo.errors import FusionZooError, as_keywords
from fusionzoo.files import replacing_tensors, write_json
from fusionzoo.fusion import FUSIONS, Fusion, create_fusion
from fusionzoo.fusion.base import two_layer_classifier
from fusionzoo.fusion.late.ensemble import Ensemble
from fusionzoo.ground.version import __version__
from fusionzoo.structures import (
    Batch,
    Features,
    FusionOutput,
    Inputs,
    Sample,
    check_finite,
    evaluating,
    to_device,
)
from fusionzoo.targets import Target, from_spec

from .answering import Answering, RawSamples
from .borrowed import find_borrowed, stored_part
from .card import card_text, write_card
from .confidence import Calibration
from .folder import FORMAT, files_of_model, public_spec, sources, write_digests
from .hub import push
from .standardise import Standardise, standardise
from .trained_on import TrainedOn, as_trained

if TYPE_CHECKING:
    from fusionzoo.datasets import PairedDataset

Raw = Mapping[str, Any]  # modality -> path, PIL image, string, array; absent = missing


def encode_rows(encoder: Encoder, inputs: Inputs, present: np.ndarray) -> Features:
    """Encode the rows where `present` (B,) holds; the others get an empty mask and zeros.

    Inputs that are `Features` were encoded before. `present` lies in the CPU's memory, see
    `Batch.presence`: nothing here waits for the device.
    """
    if isinstance(inputs, Features):
        if present.all():
            return inputs
        return hide_absent(inputs, to_device(torch.from_numpy(present), inputs.mask.device))
    if present.all() and len(present):
        return encoder(inputs)
    numbers, device = np.flatnonzero(present), next(iter(inputs.values())).device
    if not len(numbers) and encoder.sharded:
        return _run_blank(encoder, inputs, len(present))
    if not len(numbers):
        zero_gradient = sum(
            (p.flatten()[:1].sum() for p in encoder.parameters() if p.requires_grad), 0.0
        )
        dtype = next((p.dtype for p in encoder.parameters()), torch.get_default_dtype())
        empty = torch.zeros(len(present), encoder.dim, device=device, dtype=dtype)
        pooled = empty + 0.0 * zero_gradient
        mask = torch.zeros(len(present), 1, dtype=torch.bool, device=device)
        return Features(pooled[:, None], mask, pooled)
    rows = to_device(torch.from_numpy(numbers), device)
    encoded: Features = encoder({name: x.index_select(0, rows) for name, x in inputs.items()})

    def scatter(x: Tensor) -> Tensor:
        return x.new_zeros(len(present), *x.shape[1:]).index_copy(0, rows, x)

    return Features(*map(scatter, encoded))


def hide_absent(features: Features, present: Tensor) -> Features:
    """Return features with an empty mask and zeros in the rows where `present` (B,) is False."""
    return Features(
        features.tokens.masked_fill(~present[:, None, None], 0),
        features.mask & present[:, None],
        features.pooled.masked_fill(~present[:, None], 0),
    )


def _run_blank(encoder: Encoder, inputs: Mapping[str, Tensor], count: int) -> Features:
    """Encode one blank row with weight zero: where processes share weights, all must run alike."""
    if not count:
        blank = encoder.processor(False).blank()
        inputs = {name: blank[name][None].to(x) for name, x in inputs.items()}
    with evaluating(encoder):
        blank_features: Features = encoder({name: x[:1] for name, x in inputs.items()})
    tokens = (0.0 * blank_features.tokens).expand(count, -1, -1)
    mask = torch.zeros(count, tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return Features(tokens, mask, (0.0 * blank_features.pooled).expand(count, -1))


class UnimodalHeads(nn.Module):
    """A two-layer classifier per modality, on its encoder's pooled features.

    Shows what the fusion gains, without changing its training: features are detached, and no random
    numbers are drawn. A row that lacks the modality gets the logits of `prior` (K,), the class
    frequencies or odds of the training split.
    """

    prior: Tensor

    def __init__(self, dims: Mapping[str, int], dim: int, prior: Tensor) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("prior", prior.clone())  # heads of several models share none
        self.heads = nn.ModuleDict(
            {name: two_layer_classifier(width, dim, len(prior)) for name, width in dims.items()}
        )

    def forward(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        return {name: self._logits(name, features[name]) for name in self.heads}

    def _logits(self, name: str, features: Features) -> Tensor:
        present = features.mask.any(1)[:, None]  # (B, 1)
        pooled = torch.where(present, features.pooled.detach(), 0)
        logits = self.heads[name](pooled)
        return torch.where(present, logits, self.prior.log().to(logits.dtype))


class JoinedHeads(UnimodalHeads):
    """The heads of an ensemble's members, whose answers are averaged as those of its fusion."""

    def __init__(self, members: Sequence[UnimodalHeads], fusion: Ensemble) -> None:
        super().__init__({}, members[0].dim, members[0].prior)
        self.members = nn.ModuleList(members)
        # Methods, as a module would be stored twice.
        self._features_of, self._average = fusion.features_of, fusion.average

    def forward(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        answers: list[dict[str, Tensor]] = [
            member(self._features_of(number, features))
            for number, member in enumerate(self.members)
        ]
        return {name: self._average([x[name] for x in answers]) for name in answers[0]}


def build_heads(fusion: Fusion, dims: Mapping[str, int], dim: int, prior: Tensor) -> UnimodalHeads:
    """Return new heads for the modalities of a model with this fusion."""
    if not isinstance(fusion, Ensemble):
        return UnimodalHeads(dims, dim, prior)
    members = [UnimodalHeads(member.dims, dim, prior) for member in fusion.fusions()]
    return JoinedHeads(members, fusion)


def fall_back(logits: Tensor, unimodal: Mapping[str, Tensor], present: Tensor) -> Tensor:
    """Replace the fusion's logits (B, K) by those of the unimodal head in rows that have only one
    modality; the columns of `present` (B, M) are in the order of `unimodal`."""
    only = present & (present.sum(1, keepdim=True) == 1)
    for column, head_logits in enumerate(unimodal.values()):
        logits = torch.where(only[:, column, None], head_logits.to(logits.dtype), logits)
    return logits


def accept_one_value(module: nn.Module) -> None:
    """Have batch norm layers use their running statistics where there is one value per channel.

    That is a last batch of one sample, or a batch in which one sample has the modality; a variance
    needs two values.
    """
    for norm in module.modules():
        is_new = _pause_training not in norm._forward_pre_hooks.values()
        if is_new and isinstance(norm, _BatchNorm) and norm.track_running_stats:
            norm.register_forward_pre_hook(_pause_training)
            norm.register_forward_hook(_resume_training, always_call=True)


def _pause_training(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0].numel() // max(inputs[0].shape[1], 1)
    if norm.training and values == 1 and not isinstance(norm, nn.SyncBatchNorm):
        norm.training, norm.paused = False, True  # type: ignore[assignment]


def _resume_training(norm: nn.Module, inputs: Any, output: Any) -> None:
    if getattr(norm, "paused", False):
        norm.training, norm.paused = True, False  # type: ignore[assignment]


class FusionModel(Answering, nn.Module):
    """One encoder per modality, then a fusion.

    Only rows that have a modality are encoded (gathered, encoded, scattered back), so a missing
    image costs nothing and touches no running statistic. Where a whole batch lacks a modality,
    its encoder's parameters take part with weight zero: under DDP each rank then has a gradient for
    every parameter, and nothing waits. `complete` adds what training measures or learns beside.

    Shapes: `forward(batch)` returns embedding (B, dim), logits (B, K).
    """

    prior_logits: Tensor | None

    def __init__(
        self,
        encoders: Mapping[str, Encoder],
        fusion: Fusion,
        components: Raw,
        classes: Sequence[str],
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.fusion = fusion
        self._components = dict(components)
        self.classes = list(classes)
        targets = components.get("targets")  # None: one class of `classes`
        self.targets = None if targets is None else [from_spec(target) for target in targets]
        self.standardise = nn.ModuleDict()  # modality -> Standardise, of encoders that stay frozen
        self.align = nn.ModuleDict()  # modality -> map to a space where partners are near
        self.heads: UnimodalHeads | None = None  # a classifier of each modality alone
        self.trained_on: TrainedOn | None = None  # None: not known
        self.calibration: Calibration | None = None  # of the answers; None: as they were trained
        self.readme: str | None = None  # what `save` writes as README.md; None: a model card
        self._first_weights: Mapping[str, Mapping[str, str]] = {}  # of a model that was loaded
        self._sources: Mapping[str, Raw] = {m: e.spec for m, e in encoders.items()}
        self._prior: list[float] | None = None
        self._matryoshka: list[int] = []
        # Logits (K,) of a sample without any modality; not stored, for they follow from the prior.
        self.register_buffer("prior_logits", None, persistent=False)
        accept_one_value(self)

    def complete(
        self,
        *,
        prior: Tensor | None = None,
        standardise: Mapping[str, Standardise] | None = None,
        align: Mapping[str, nn.Linear] | None = None,
        matryoshka: Sequence[int] = (),
        heads: UnimodalHeads | None = None,
        trained_on: TrainedOn | None = None,
        calibration: Calibration | None = None,
        first_weights: Mapping[str, Mapping[str, str]] | None = None,
        sources: Mapping[str, Raw] | None = None,
    ) -> FusionModel:
        """Add what training measures or learns beside encoders and fusion; return the model.

        Args:
            prior: exp(logits) (K,) of the training split, the answer to samples without any
                modality: class frequencies, odds of labels, 1 for a standardised number
            standardise: modality -> what centres and scales its features, for all that reads them
            align: modality -> map that contrastive training learnt: `embed` returns its vectors
            matryoshka: sizes of the fused vector's prefixes that were trained
            heads: the modalities' own heads: `predict` may then fall back to them
            trained_on: the data of the training
            calibration: temperatures, thresholds and conformal scores of the validation split
            first_weights: modality -> `source` and `licence` of its encoder's first weights, where
                the encoders were built without them
            sources: modality -> its encoder's settings with the source of its first weights, too
        """
        if prior is not None:
            self._prior = prior.tolist()
            self.prior_logits = prior.float().clamp(min=1e-9).log().to(self.device)
        if standardise:
            self.standardise = nn.ModuleDict(standardise).to(self.device)
        if align:
            self.align = nn.ModuleDict(align)
        if matryoshka:
            self._matryoshka = list(matryoshka)
        if heads is not None:
            self.heads = heads
        if trained_on is not None:
            self.trained_on = trained_on
        if calibration is not None:
            self.calibration = calibration
        if first_weights:
            self._first_weights = first_weights
        if sources:
            self._sources = sources
        return self

    @property
    def spec(self) -> dict[str, Any]:
        """What `config.json` says of the model: its components' settings, and what was added."""
        align = {name: linear.out_features for name, linear in self.align.items()}
        added = {
            "prior": self._prior,
            "standardise": list(self.standardise),
            "align": align,
            "matryoshka": self._matryoshka,
            "unimodal_dim": None if self.heads is None else self.heads.dim,
            "first_weights": self._first_weights
            or {name: origin_of(encoder) for name, encoder in self.named_encoders()},
        }
        if self.fusion.linear_skip is not None:  # which training may have added
            added["fusion"] = {**self._components["fusion"], "linear_skip": True}
        return {**self._components, **{key: x for key, x in added.items() if x}}

    @property
    def modalities(self) -> dict[str, str]:
        """Modality -> kind, in the order of the batch's columns."""
        return {name: encoder.kind for name, encoder in self.named_encoders()}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def named_encoders(self) -> Iterator[tuple[str, Encoder]]:
        """Yield modality and encoder."""
        for name, module in self.encoders.items():
            assert isinstance(module, Encoder)
            yield name, module

    def encode(self, batch: Batch) -> dict[str, Features]:
        """Encode the rows that have each modality; standardise those with statistics."""
        return standardise(self._run_encoders(batch), self.standardise)

    def _run_encoders(self, batch: Batch) -> dict[str, Features]:
        present = batch.presence()
        return {
            name: encode_rows(encoder, batch.inputs[name], present[:, column])
            for column, (name, encoder) in enumerate(self.named_encoders())
        }

    def forward(self, batch: Batch) -> FusionOutput:
        return self.fuse(self.encode(batch))

    def fuse(self, features: Mapping[str, Features]) -> FusionOutput:
        """Fuse what `encode` returned; a sample without any modality gets the logits of the prior.

        Where every training sample has a modality, no sample teaches the fusion what to answer
        without one. Where some have none it learns that, so training steps call `self.fusion`.
        """
        output: FusionOutput = self.fusion(features)
        if self.prior_logits is None:
            return output
        has_any = torch.stack([x.mask.any(1) for x in features.values()]).any(0)[:, None]  # (B, 1)
        prior = self.prior_logits.to(output.logits)  # the benchmark moves the fusion alone
        logits = torch.where(has_any, output.logits, prior)
        # Not `_replace`, which torch.compile cannot trace here.
        return FusionOutput(output.embedding, logits, output.unimodal, output.weights, output.extra)

    @torch.no_grad()
    def embed(
        self, samples: Batch | Sequence[Raw | Sample], batch_size: int = 64
    ) -> dict[str, Tensor]:
        """Return `fused` (B, dim) and each encoder's own pooled vectors (B, D); absent rows are 0.

        After contrastive training also `aligned_<modality>`, unit vectors in the common space.
        Samples are decoded and encoded `batch_size` at a time, the longest first, and their vectors
        stand in the order given; a `Batch` is encoded at once.
        """
        vectors = self._in_batches(samples, batch_size, lambda x: self.embed_and_answer(x)[0])
        check_finite(*vectors.values())
        return vectors

    @torch.no_grad()
    def embed_and_answer(self, batch: Batch) -> tuple[dict[str, Tensor], FusionOutput]:
        """Return the vectors of `embed`, and the fusion's output, for a batch on the device."""
        with evaluating(self):
            encoded = self._run_encoders(batch)
            features = standardise(encoded, self.standardise)
            output = self.fuse(features)
            output = output._replace(logits=self.calibrate(output.logits, features))
        present = dict(zip(encoded, batch.present.unbind(1), strict=True))
        vectors = {name: _zero_absent(x, present[name]) for name, x in encoded.items()}
        aligned = {
            f"aligned_{name}": F.normalize(project(_zero_absent(features[name], present[name])))
            * present[name][:, None]
            for name, project in self.align.items()
        }
        return {"fused": output.embedding, **vectors, **aligned}, output

    @torch.no_grad()
    def weights(
        self, samples: Batch | Sequence[Raw | Sample], batch_size: int = 64
    ) -> dict[str, Tensor]:
        """Return how much each modality counted in each sample, {name: (B,)}, as the fusion says.

        Of `i2moe`, how much each of its experts counted: uniqueness of a modality, synergy,
        redundancy.
        """

        def run(batch: Batch) -> dict[str, Tensor]:
            with evaluating(self):
                return dict(self.fusion.shares(self.fusion(self.encode(batch))))

        shares = self._in_batches(samples, batch_size, run)
        if not shares:
            raise FusionZooError(
                f"fusion {self.spec['fusion']['name']!r} has no weights of its modalities; gmu,"
                " attn_pool, late_confidence and i2moe have some"
            )
        return shares

    @torch.no_grad()
    def predict(
        self,
        samples: Batch | Sequence[Raw | Sample],
        fallback: Literal["unimodal"] | None = None,
        batch_size: int = 64,
    ) -> list[Any]:
        """Answer raw samples, `[{"image": "cat.png", "text": "a cat"}, ...]`, or rows of a table:
        a DataFrame, or dicts with the columns that the model was trained on.

        A `Prediction` for a class or a level, `Labels`, or a number in the data's own units; of
        several targets a dict of them by column. `fallback="unimodal"`: a sample with a single
        modality is answered by that modality's own head, stored with the model, not by the fusion.
        Samples are decoded and run `batch_size` at a time, as in `embed`.
        """
        if not (self.classes or self.targets):
            raise FusionZooError("this model was trained without a target: it can only embed")
        if fallback not in (None, "unimodal"):
            raise FusionZooError(f"fallback={fallback!r} is neither None nor 'unimodal'")
        if fallback and self.heads is None:
            raise FusionZooError(
                "fallback='unimodal': this model has no head of each modality alone; train it with"
                " this version of fusionzoo and --train.unimodal true"
            )

        def run(batch: Batch) -> dict[str, Tensor]:
            with evaluating(self):
                features = self.encode(batch)
                logits = self.calibrated_logits(features)
                if fallback and self.heads is not None:
                    logits = fall_back(logits, self.heads(features), batch.present)
            return {"logits": logits}

        answers = self.decode(self._in_batches(samples, batch_size, run)["logits"])
        return [as_trained(answer, self.types_of_labels) for answer in answers]

    def answer(self, features: Mapping[str, Features]) -> list[Any]:
        """Answer samples that `encode` has encoded, see `predict`."""
        return self.decode(self.calibrated_logits(features))

    def calibrated_logits(self, features: Mapping[str, Features]) -> Tensor:
        """Return float32 logits (B, K) of encoded samples, divided by the temperatures, if any."""
        return self.calibrate(self.fuse(features).logits.float(), features)

    def calibrate(self, logits: Tensor, features: Mapping[str, Features]) -> Tensor:
        """Divide logits by the temperatures; those of a sample without any modality stay."""
        if self.calibration is None:
            return logits
        scaled = self.calibration.scale(self.answer_targets, logits)
        has_any = torch.stack([x.mask.any(1) for x in features.values()]).any(0)[:, None]
        return torch.where(has_any, scaled, logits)

    def collate(self, *samples: Any, train: bool = False) -> Any:
        """Return the picklable function that turns a list of samples into this model's batch."""
        from fusionzoo.datasets import Collate

        if samples:
            raise FusionZooError(
                "model.collate returns the function that makes batches: call it, as in"
                " DataLoader(..., collate_fn=model.collate()), or with train=True for training"
            )
        processors = {
            name: encoder.loader_processor(train) for name, encoder in self.named_encoders()
        }
        columns = None if self.targets is None else sum(target.columns for target in self.targets)
        return Collate(processors, columns)

    def save(
        self,
        folder: str | Path,
        weights: Mapping[str, Tensor] | None = None,
        *,
        borrow: bool = False,
    ) -> Path:
        """Write `config.json`, `model.safetensors` and what the processors need; no pickle.

        `digests.json` lets `load` notice files that were changed. `README.md` is a model card; one
        that somebody wrote or edited is kept.

        Of paths on this machine only the last part is written. Of encoders and fusions that are not
        fusionzoo's own, `config.json` names the plugins.
        `weights` stand in for the model's own, where processes share those.

        `borrow` leaves out the encoders that a package or a hub holds and training did not change:
        the folder names them, with a digest, and `load` reads them from there.
        """
        return self._save(Path(folder), weights, borrow=borrow)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        borrow: bool = False,
    ) -> str:
        """Upload the model folder to the Hugging Face Hub, `"owner/name"`; return the address.

        The repository is created if there is none, `private` or not, and so is the branch
        `revision`. A README that somebody
        wrote or edited there is kept. `token` is by default the one of `hf auth login`. `borrow`
        as in `save`.
        """
        with TemporaryDirectory() as scratch:
            folder = self._save(Path(scratch), repository=name, borrow=borrow)
            return push(folder, name, private=private, token=token, revision=revision)

    @classmethod
    def from_pretrained(cls, name: str | Path, **settings: Any) -> FusionModel:
        """Load a folder or a model of the Hub, as `fusionzoo.load` does, by the usual name."""
        import fusionzoo  # `load` stands above this module

        return fusionzoo.load(name, **settings)

    def _save(
        self,
        folder: Path,
        weights: Mapping[str, Tensor] | None = None,
        repository: str = "",
        *,
        borrow: bool = False,
    ) -> Path:
        """Write the folder, with a card for a `repository` if one is named."""
        from safetensors.torch import save_file, save_model

        encoders = dict(self.named_encoders())
        borrowed = find_borrowed(encoders, self._sources) if borrow else {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in encoders.keys() - borrowed.keys():
            encoders[name].save_assets(folder / name)
        with replacing_tensors(folder / "model.safetensors") as partial:
            if weights is None:
                save_model(stored_part(self, borrowed), str(partial))
            else:
                left_out = tuple(f"encoders.{name}." for name in borrowed)
                held = {name: x for name, x in weights.items() if not name.startswith(left_out)}
                save_file(held, str(partial))
        about = {"format": FORMAT, "fusionzoo": __version__, "torch": str(torch.__version__)}
        recorded = {"plugins": sources(self)} if sources(self) else {}
        lent = {"encoders": self._sources, "borrowed": borrowed} if borrowed else {}
        config = public_spec({**about, **recorded, "classes": self.classes, **self.spec, **lent})
        trained_on = self.trained_on and self.trained_on.without_folders()
        write_json(folder / "config.json", config)
        self.save_facts(folder)
        num_parameters = sum(p.numel() for p in self.parameters())
        card = card_text(config, trained_on, num_parameters, repository)
        write_card(folder, self.readme or card)
        write_digests(folder, files_of_model(folder, list(self.encoders)))
        return folder

    def batch(self, samples: Batch | Sequence[Raw | Sample]) -> Batch:
        """Turn raw samples, or rows of a table, into a batch on the model's device.

        Rows are a DataFrame, an Arrow table or a list of dicts with the names of the columns that
        the model was trained on.
        """
        if isinstance(samples, Batch):
            return samples.to(self.device)
        with _in_keywords():
            rows = self.open_samples(samples)
            return self._collated(rows, range(len(rows)))

    def _in_batches(
        self,
        samples: Batch | Sequence[Raw | Sample],
        batch_size: int,
        run: Callable[[Batch], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Run so many samples at a time, the longest first; return rows in the order given."""
        if batch_size < 1:
            raise FusionZooError(f"batch_size={batch_size}: at least 1 is needed")
        if isinstance(samples, Batch):
            return run(self.batch(samples))
        with _in_keywords():
            rows = self.open_samples(samples)
            if len(rows) <= batch_size:
                return run(self._collated(rows, range(len(rows))))
            order = rows.by_length()
            parts = [
                run(self._collated(rows, order[start : start + batch_size]))
                for start in range(0, len(order), batch_size)
            ]
        places = torch.tensor(order).argsort().to(self.device)
        return {name: torch.cat([part[name] for part in parts])[places] for name in parts[0]}

    def _collated(self, rows: RawSamples | PairedDataset, places: Sequence[int]) -> Batch:
        batch: Batch = self.collate()([rows[place] for place in places])
        return batch.to(self.device)


@contextmanager
def _in_keywords() -> Iterator[None]:
    """Name settings in an error as keywords of the functions that take them."""
    try:
        yield
    except FusionZooError as error:
        message = as_keywords(str(error))
        if message == str(error):
            raise
        settings = "which is a setting of fusionzoo.predict and fusionzoo.embed"
        raise type(error)(f"{message} ({settings})") from error


def _zero_absent(features: Features, present: Tensor) -> Tensor:
    return features.pooled.masked_fill(~present[:, None], 0)


def create_model(
    fusion: str | Raw = "gmu",
    encoders: Mapping[str, str | Raw | Encoder] | None = None,
    num_outputs: int | None = None,
    *,
    classes: Sequence[str] = (),
    targets: Sequence[Target] | None = None,
    dim: int = 128,
    kinds: Mapping[str, str] | None = None,
    assets: Path | None = None,
) -> FusionModel:
    """Build a model: `create_model("gmu", {"image": "timm/resnet18", "text": "chars"}, 10)`.

    A component is a name or `{"name": ..., **settings}`; an encoder may also be one that was built
    in Python, such as `wrap_encoder` makes of a module. `kinds` says what a modality holds whose
    name is not a kind (`{"xray": "image"}`). `targets` are what the model answers if that is not
    one class of `classes`; none at all gives it one idle output. `assets` is a model folder to read
    processors from.
    """
    if not encoders:
        raise FusionZooError("a model needs at least one encoder: encoders={'image': ...}")
    if num_outputs is None:
        widths = [target.width for target in targets or ()]
        num_outputs = len(classes) if targets is None else max(1, sum(widths))
    if num_outputs < 1:
        raise FusionZooError("a model needs num_outputs, or the names of its classes")
    with shared_checkpoints():
        built = {
            modality: _build_encoder(modality, encoder, (kinds or {}).get(modality), assets)
            for modality, encoder in encoders.items()
        }
    fusion_settings = {"dim": dim, **_component(fusion)}
    name, settings = split_name(fusion_settings, "fusion")
    dims = {modality: encoder.dim for modality, encoder in built.items()}
    head = create_fusion(name, dims, settings.pop("dim"), num_outputs, **settings)
    components = {
        "num_outputs": num_outputs,
        "fusion": {**fusion_settings, "name": FUSIONS[name].name},  # not an old name
        "encoders": {m: e.spec for m, e in built.items()},
    }
    components["kinds"] = {m: e.kind for m, e in built.items()}
    if targets is not None:
        components["targets"] = [target.spec for target in targets]
        refuse_other_answers(name, head)
    return FusionModel(built, head, components, classes)


def _build_encoder(
    modality: str, encoder: str | Raw | Encoder, kind: str | None, assets: Path | None
) -> Encoder:
    if isinstance(encoder, Encoder):
        return adopt(encoder, modality, kind)
    name, settings = split_name(_component(encoder), f"encoders.{modality}")
    settings.setdefault("kind", kind)
    if assets is not None:
        settings |= {"assets": assets / modality}
    return create_encoder(modality, name, **settings)


def refuse_other_answers(name: str, fusion: Fusion) -> None:
    """Stop where a fusion's logits are those of one class, and other targets are asked for."""
    if fusion.classes_only:
        raise FusionZooError(
            f"fusion {name!r} joins the probabilities of classes: it learns objective"
            " 'classification' of one column `target`, without missing labels, and no other"
        )


def _component(component: str | Raw) -> dict[str, Any]:
    return {"name": component} if isinstance(component, str) else dict(component)
