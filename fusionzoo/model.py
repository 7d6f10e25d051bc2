"""Encoders and a fusion, joined: train it, save it, load it anywhere, give it raw samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import split_name
from .encoders import Encoder, create_encoder
from .errors import FusionZooError, did_you_mean, one_line
from .fusion import Fusion, create_fusion
from .model_folder import FORMAT, FolderConfig, bounded_allocation, read_config
from .predictions import predictions
from .structures import Batch, Features, FusionOutput, Sample
from .targets import Target, decode, from_spec
from .unimodal import UnimodalHeads, fall_back
from .version import __version__

Raw = Mapping[str, Any]  # modality -> path, PIL picture, string, array; absent = missing


class FusionModel(nn.Module):
    """One encoder per modality, then a fusion.

    Only rows that have a modality are encoded (gathered, encoded, scattered back), so a missing
    picture costs nothing and touches no running statistic. Where a whole batch lacks a modality,
    its encoder's parameters take part with weight zero: under DDP each rank then has a gradient for
    every parameter, and nothing waits.

    Shapes: `forward(batch)` returns embedding (B, dim), logits (B, K).
    """

    def __init__(
        self, encoders: Mapping[str, Encoder], fusion: Fusion, spec: Raw, classes: Sequence[str]
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.fusion = fusion
        self.spec = dict(spec)
        self.classes = list(classes)
        targets = self.spec.get("targets")  # None: one class of `classes`
        self.targets = None if targets is None else [from_spec(one) for one in targets]
        self.align = nn.ModuleDict()  # modality -> map to a space where partners are near
        self.heads: UnimodalHeads | None = None  # a classifier of each modality alone

    def set_heads(self, heads: UnimodalHeads) -> None:
        """Take the modalities' own heads: `predict` may then fall back to them."""
        self.heads = heads
        self.spec["unimodal_dim"] = heads.dim

    def set_align(self, maps: Mapping[str, nn.Linear]) -> None:
        """Take the maps that contrastive training learnt: `embed` then returns their vectors."""
        self.align = nn.ModuleDict(maps)
        self.spec["align"] = {name: one.out_features for name, one in maps.items()}

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
        """Run each encoder on the rows that have its modality."""
        return {
            name: encode_rows(encoder, batch.inputs[name], batch.present[:, column])
            for column, (name, encoder) in enumerate(self.named_encoders())
        }

    def forward(self, batch: Batch) -> FusionOutput:
        output: FusionOutput = self.fusion(self.encode(batch))
        return output

    @torch.no_grad()
    def embed(self, samples: Batch | Sequence[Raw | Sample]) -> dict[str, Tensor]:
        """Return `fused` (B, dim) and each modality's pooled features (B, D); absent rows are 0.

        After contrastive training also `aligned_<modality>`, unit vectors in the common space.
        """
        batch = self._batch(samples)
        with quiet(self):
            features = self.encode(batch)
            fused = self.fusion(features).embedding
        own = {
            name: _zero_absent(x, batch.present[:, i])
            for i, (name, x) in enumerate(features.items())
        }
        there = dict(zip(own, batch.present.unbind(1), strict=True))
        aligned = {
            f"aligned_{name}": F.normalize(one(own[name]), dim=1) * there[name][:, None]
            for name, one in self.align.items()
        }
        return {"fused": fused, **own, **aligned}

    @torch.no_grad()
    def predict(
        self,
        samples: Batch | Sequence[Raw | Sample],
        fallback: Literal["unimodal"] | None = None,
    ) -> list[Any]:
        """Answer raw samples: `[{"image": "cat.png", "text": "a cat"}, ...]`.

        A `Prediction` for a class or a level, `Labels`, or a number in the data's own units; of
        several targets a dict of them by column. `fallback="unimodal"`: a sample with a single
        modality is answered by that modality's own head, stored with the model, not by the fusion.
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
        batch = self._batch(samples)
        with quiet(self):
            features = self.encode(batch)
            logits = self.fusion(features).logits.float()
            if fallback and self.heads is not None:
                logits = fall_back(logits, self.heads(features), batch.present)
        return self._decode(logits)

    def answer(self, features: Mapping[str, Features]) -> list[Any]:
        """Answer samples that `encode` has encoded, see `predict`."""
        return self._decode(self.fusion(features).logits.float())

    def _decode(self, logits: Tensor) -> list[Any]:
        if self.targets is not None:
            return decode(self.targets, logits)
        return predictions(self.classes, logits.softmax(-1))

    def collate(self, train: bool = False) -> Any:
        """Return the picklable function that turns a list of samples into this model's batch."""
        from .datasets import Collate

        processors = {name: encoder.processor(train) for name, encoder in self.named_encoders()}
        columns = None if self.targets is None else sum(one.columns for one in self.targets)
        return Collate(processors, columns)

    def save(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write `config.json`, `model.safetensors` and what the processors need; no pickle.

        `weights` stand in for the model's own, where processes share those.
        """
        from safetensors.torch import save_file, save_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, encoder in self.named_encoders():
            encoder.save_assets(folder / name)
        if weights is None:
            save_model(self, str(folder / "model.safetensors"))
        else:
            save_file(dict(weights), str(folder / "model.safetensors"))
        about = {"format": FORMAT, "fusionzoo": __version__, "torch": str(torch.__version__)}
        config = {**about, "classes": self.classes, **self.spec}
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        return folder

    def _batch(self, samples: Batch | Sequence[Raw | Sample]) -> Batch:
        if isinstance(samples, Batch):
            return samples.to(self.device)
        if isinstance(samples, Mapping | str):
            raise FusionZooError("give a list of samples: [{'image': 'cat.png', 'text': ...}]")
        rows = [self._sample(one, number) for number, one in enumerate(samples)]
        batch: Batch = self.collate()(rows)
        return batch.to(self.device)

    def _sample(self, raw: Raw | Sample, number: int) -> Sample:
        from .datasets.media import decode

        if isinstance(raw, Sample):
            return raw
        for name in raw:
            if name not in self.encoders:
                raise FusionZooError(
                    f"sample {number}: the model has no modality {name!r}."
                    f"{did_you_mean(name, self.encoders)} It has: {', '.join(self.encoders)}."
                )
        given = {name: raw.get(name) for name in self.encoders}
        values = {m: None if x is None else decode(self.modalities[m], x) for m, x in given.items()}
        return Sample(str(number), "", None, values)


def create_model(
    fusion: str | Raw = "gmu",
    encoders: Mapping[str, str | Raw] | None = None,
    num_outputs: int | None = None,
    *,
    classes: Sequence[str] = (),
    targets: Sequence[Target] | None = None,
    dim: int = 128,
    kinds: Mapping[str, str] | None = None,
    assets: Path | None = None,
) -> FusionModel:
    """Build a model: `create_model("gmu", {"image": "timm/resnet18", "text": "chars"}, 10)`.

    A component is a name or `{"name": ..., **settings}`. `kinds` says what a modality holds whose
    name is not a kind (`{"xray": "image"}`). `targets` are what the model answers if that is not
    one class of `classes`; none at all gives it one idle output. `assets` is a model folder to read
    processors from.
    """
    if not encoders:
        raise FusionZooError("a model needs at least one encoder: encoders={'image': ...}")
    if num_outputs is None:
        widths = [one.width for one in targets or ()]
        num_outputs = len(classes) if targets is None else max(1, sum(widths))
    if num_outputs < 1:
        raise FusionZooError("a model needs num_outputs, or the names of its classes")
    specs = {name: _component(given) for name, given in encoders.items()}
    built = {}
    for modality, given in specs.items():
        name, settings = split_name(given, f"encoders.{modality}")
        settings.setdefault("kind", (kinds or {}).get(modality))
        if assets is not None:
            settings |= {"assets": assets / modality}
        built[modality] = create_encoder(modality, name, **settings)
    given = {"dim": dim, **_component(fusion)}
    name, settings = split_name(given, "fusion")
    dims = {modality: encoder.dim for modality, encoder in built.items()}
    head = create_fusion(name, dims, settings.pop("dim"), num_outputs, **settings)
    spec = {
        "num_outputs": num_outputs,
        "fusion": given,
        "encoders": {m: e.spec for m, e in built.items()},
    }
    spec["kinds"] = {m: e.kind for m, e in built.items()}
    if targets is not None:
        spec["targets"] = [one.spec for one in targets]
        refuse_other_answers(name, head)
    return FusionModel(built, head, spec, classes)


def load(folder: str | Path, device: str | torch.device = "cpu") -> FusionModel:
    """Load a model folder, or the model of a run folder; needs no hub and no original settings."""
    from safetensors.torch import load_model

    folder = Path(folder)
    folder = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    if not (folder / "config.json").is_file():
        raise FusionZooError(f"{folder} is no model folder: it holds no config.json")
    config, targets = read_config(folder)
    weights = folder / "model.safetensors"
    with bounded_allocation(weights):
        model = _build(folder, config, targets)
    try:
        load_model(model, str(weights), strict=True)
    except Exception as error:
        raise FusionZooError(f"{weights}: {one_line(error)}") from error
    model.to(device).eval()
    with bounded_allocation(weights):
        _answer_blank(model, folder)
    return model


def _build(folder: Path, config: FolderConfig, targets: list[Target] | None) -> FusionModel:
    """Build what config.json describes, with weights yet to be loaded."""
    try:
        model = create_model(
            config.fusion,
            {m: _without_sources(spec) for m, spec in config.encoders.items()},
            config.num_outputs,
            classes=config.classes,
            targets=targets,
            kinds=config.kinds,
            assets=folder,
        )
        dims = {name: encoder.dim for name, encoder in model.named_encoders()}
        if config.unimodal_dim is not None:
            prior = torch.ones(config.num_outputs)
            model.set_heads(UnimodalHeads(dims, config.unimodal_dim, prior))
        if config.align:
            model.set_align({m: nn.Linear(dims[m], n) for m, n in config.align.items()})
    except Exception as error:
        raise FusionZooError(f"{folder / 'config.json'}: {one_line(error)}") from error
    return model


def _answer_blank(model: FusionModel, folder: Path) -> None:
    """Run one blank sample, so that settings with which the model cannot answer are found here."""
    try:
        batch: Batch = model.collate()([Sample("", "", None, {})])
        batch = batch._replace(present=torch.ones_like(batch.present))
        if model.classes or model.targets:
            model.predict(batch)
        else:
            model.embed(batch)
    except Exception as error:
        raise FusionZooError(
            f"{folder / 'config.json'}: the model cannot answer: {one_line(error)}"
        ) from error


def encode_rows(encoder: Encoder, inputs: Mapping[str, Tensor], present: Tensor) -> Features:
    """Encode the rows where `present` (B,) holds; the others get an empty mask and zeros."""
    if bool(present.all()) and len(present):
        return encoder(inputs)
    rows = present.nonzero()[:, 0]
    if not len(rows) and encoder.sharded:
        return _run_blank(encoder, inputs, len(present))
    if not len(rows):
        touch = sum((p.flatten()[:1].sum() for p in encoder.parameters() if p.requires_grad), 0.0)
        dtype = next((p.dtype for p in encoder.parameters()), torch.get_default_dtype())
        empty = torch.zeros(len(present), encoder.dim, device=present.device, dtype=dtype)
        pooled = empty + 0.0 * touch
        mask = torch.zeros(len(present), 1, dtype=torch.bool, device=present.device)
        return Features(pooled[:, None], mask, pooled)
    some: Features = encoder({name: x.index_select(0, rows) for name, x in inputs.items()})

    def scatter(x: Tensor) -> Tensor:
        return x.new_zeros(len(present), *x.shape[1:]).index_copy(0, rows, x)

    return Features(*map(scatter, some))


def _run_blank(encoder: Encoder, inputs: Mapping[str, Tensor], count: int) -> Features:
    """Encode one blank row with weight zero: where processes share weights, all must run alike."""
    if not count:
        blank = encoder.processor(False).blank()
        inputs = {name: blank[name][None].to(x) for name, x in inputs.items()}
    with quiet(encoder):
        made: Features = encoder({name: x[:1] for name, x in inputs.items()})
    tokens = (0.0 * made.tokens).expand(count, -1, -1)
    mask = torch.zeros(count, tokens.shape[1], dtype=torch.bool, device=tokens.device)
    return Features(tokens, mask, (0.0 * made.pooled).expand(count, -1))


def refuse_other_answers(name: str, fusion: Fusion) -> None:
    """Stop where a fusion's logits are those of one class, and other targets are asked for."""
    if fusion.classes_only:
        raise FusionZooError(
            f"fusion {name!r} joins the probabilities of classes: it learns objective"
            " 'classification' of one column `target`, without missing labels, and no other"
        )


def _zero_absent(features: Features, present: Tensor) -> Tensor:
    return features.pooled.masked_fill(~present[:, None], 0)


def _component(given: str | Raw) -> dict[str, Any]:
    return {"name": given} if isinstance(given, str) else dict(given)


def _without_sources(spec: Raw) -> dict[str, Any]:
    """Return an encoder's settings without the sources of its first weights."""
    return {k: v for k, v in spec.items() if k not in ("weights", "match", "prefix", "init")}


@contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode: no dropout, nothing random, no statistic moves."""
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True
