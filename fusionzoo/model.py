"""Encoders and a fusion, joined: train it, save it, load it anywhere, give it raw samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .digests import files_of_model, write_digests
from .encoders import Encoder
from .errors import FusionZooError, did_you_mean
from .eval_mode import quiet
from .files import replacing, write_json
from .fusion import Fusion
from .model_folder import FORMAT, sources
from .predictions import predictions
from .present_rows import encode_rows
from .standardise import Standardise, standardise
from .structures import Batch, Features, FusionOutput, Sample
from .targets import decode, from_spec
from .trained_on import TrainedOn
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

    prior_logits: Tensor | None

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
        self.standardise = nn.ModuleDict()  # modality -> Standardise, of encoders that stay frozen
        self.align = nn.ModuleDict()  # modality -> map to a space where partners are near
        self.heads: UnimodalHeads | None = None  # a classifier of each modality alone
        self.trained_on: TrainedOn | None = None  # None: not known
        # Logits (K,) of a sample without any modality; not stored, for they follow from `spec`.
        self.register_buffer("prior_logits", None, persistent=False)

    def set_prior(self, prior: Tensor) -> None:
        """Answer samples without any modality by `prior`, exp(logits) (K,) of the training split:
        class frequencies, odds of labels, 1 for a standardised number."""
        self.spec["prior"] = prior.tolist()
        self.prior_logits = prior.float().clamp(min=1e-9).log().to(self.device)

    def set_heads(self, heads: UnimodalHeads) -> None:
        """Take the modalities' own heads: `predict` may then fall back to them."""
        self.heads = heads
        self.spec["unimodal_dim"] = heads.dim

    def set_standardise(self, modules: Mapping[str, Standardise]) -> None:
        """Centre and scale these modalities' features, for the fusion and all that reads them."""
        self.standardise = nn.ModuleDict(modules).to(self.device)
        self.spec["standardise"] = list(modules)

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
        """Encode the rows that have each modality; standardise those with statistics."""
        return standardise(self._run_encoders(batch), self.standardise)

    def _run_encoders(self, batch: Batch) -> dict[str, Features]:
        return {
            name: encode_rows(encoder, batch.inputs[name], batch.present[:, column])
            for column, (name, encoder) in enumerate(self.named_encoders())
        }

    def forward(self, batch: Batch) -> FusionOutput:
        return self.fuse(self.encode(batch))

    def fuse(self, features: Mapping[str, Features]) -> FusionOutput:
        """Fuse what `encode` returned; a sample without any modality gets the logits of the prior.

        A fusion's own answer to such a sample is that of parameters which complete training data
        never reach. Training steps run `self.fusion`, for some data does reach them.
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
    def embed(self, samples: Batch | Sequence[Raw | Sample]) -> dict[str, Tensor]:
        """Return `fused` (B, dim) and each encoder's own pooled vectors (B, D); absent rows are 0.

        After contrastive training also `aligned_<modality>`, unit vectors in the common space.
        """
        return self.embed_and_answer(self._batch(samples))[0]

    @torch.no_grad()
    def embed_and_answer(self, batch: Batch) -> tuple[dict[str, Tensor], FusionOutput]:
        """Return the vectors of `embed`, and the fusion's output, for a batch on the device."""
        with quiet(self):
            encoded = self._run_encoders(batch)
            features = standardise(encoded, self.standardise)
            output = self.fuse(features)
        present = dict(zip(encoded, batch.present.unbind(1), strict=True))
        vectors = {name: _zero_absent(x, present[name]) for name, x in encoded.items()}
        aligned = {
            f"aligned_{name}": F.normalize(project(_zero_absent(features[name], present[name])))
            * present[name][:, None]
            for name, project in self.align.items()
        }
        return {"fused": output.embedding, **vectors, **aligned}, output

    @torch.no_grad()
    def weights(self, samples: Batch | Sequence[Raw | Sample]) -> dict[str, Tensor]:
        """Return how much each modality counted in each sample, {name: (B,)}, as the fusion says.

        Of `i2moe`, how much each of its experts counted: uniqueness of a modality, synergy,
        redundancy.
        """
        batch = self._batch(samples)
        with quiet(self):
            shares = self.fusion.shares(self.fusion(self.encode(batch)))
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
            logits = self.fuse(features).logits.float()
            if fallback and self.heads is not None:
                logits = fall_back(logits, self.heads(features), batch.present)
        return self._decode(logits)

    def answer(self, features: Mapping[str, Features]) -> list[Any]:
        """Answer samples that `encode` has encoded, see `predict`."""
        return self._decode(self.fuse(features).logits.float())

    def _decode(self, logits: Tensor) -> list[Any]:
        if self.targets is not None:
            return decode(self.targets, logits)
        return predictions(self.classes, logits.softmax(-1))

    def collate(self, *samples: Any, train: bool = False) -> Any:
        """Return the picklable function that turns a list of samples into this model's batch."""
        from .datasets import Collate

        if samples:
            raise FusionZooError(
                "model.collate returns the function that makes batches: call it, as in"
                " DataLoader(..., collate_fn=model.collate()), or with train=True for training"
            )
        processors = {
            name: encoder.loader_processor(train) for name, encoder in self.named_encoders()
        }
        columns = None if self.targets is None else sum(one.columns for one in self.targets)
        return Collate(processors, columns)

    def save(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write `config.json`, `model.safetensors` and what the processors need; no pickle.

        `digests.json` lets `load` notice files that were changed.

        Of encoders and fusions that are not fusionzoo's own, `config.json` names the plugins.
        `weights` stand in for the model's own, where processes share those.
        """
        from safetensors.torch import save_file, save_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, encoder in self.named_encoders():
            encoder.save_assets(folder / name)
        with replacing(folder / "model.safetensors") as partial:
            if weights is None:
                save_model(self, str(partial))
            else:
                save_file(dict(weights), str(partial))
        about = {"format": FORMAT, "fusionzoo": __version__, "torch": str(torch.__version__)}
        recorded = {"plugins": sources(self)} if sources(self) else {}
        config = {**about, **recorded, "classes": self.classes, **self.spec}
        write_json(folder / "config.json", config)
        if self.trained_on is not None:
            self.trained_on.save(folder)
        write_digests(folder, files_of_model(folder, list(self.encoders)))
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


def _zero_absent(features: Features, present: Tensor) -> Tensor:
    return features.pooled.masked_fill(~present[:, None], 0)
