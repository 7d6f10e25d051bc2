"""Contrastive multimodal learning over the fusion: shared, unique and synergistic information."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.encoders import Encoder
from fusionzoo.machine.distributed import gathered_rows
from fusionzoo.structures import Batch, Features, Inputs, StepContext, keep_only, seed_of

from ._shared import check_contrast, fuse_quietly, nt_xent
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, presence

NUMERIC = ("vector", "sequence", "tabular")  # kinds whose processors do not augment
EXAMPLES: dict[str, Any] = {"text": "some words", "image": torch.zeros(3, 8, 8, dtype=torch.uint8)}


@BALANCE.register(family="loss", paper="Dufumier et al. 2025 (CoMM), ICLR, arXiv:2409.07402")
class CoMM(Balance):
    """Contrast two augmentations of a row, fused from all modalities and from each by itself.

    x', x'' are two views of the row; z_0 = g(f(all)), z_m = g(f({m})), f the fusion's embedding
    without dropout and g a head of three layers with output of length 1. L = 1 / (M + 1) sum_k (NT(
    z'_k, z''_0) + NT(z''_k, z'_0)) / 2 over k = 0..M, NT SimCLR's loss at temperature tau over the
    rows of all processes (but not of accumulated batches). k = 0 keeps what only the combination
    tells, k = m what m shares or has alone; contrasting modalities with each other keeps only what
    they share. Views: the encoders' own augmentation drawn twice; numbers of vectors, sequences and
    tables dropped to 0 at random; the encoders' dropout. Differs from the paper: layer norm instead
    of batch norm in g; a side loss by default, hence the small weight.

    Missing: a row with a single modality is only in k = 0; k = m uses the rows with m and another.
    Pitfall: with weak augmentations low-level cues solve it; watch each term. Augmentation must
    keep the label, for all modalities at once. Encoders run on two more views.
    Use when: labels are few and the task may need interaction rather than agreement.

    Settings:
        weight: weight of the loss, at least 0; 0 switches it off (pretraining: 1)
        temperature: temperature tau, above 0
        dim: width of the head g and of its output, at least 1
        drop: share of the numbers of vector, sequence and tabular inputs set to 0 in each view, 0
            to below 1

    Shapes: embeddings (B, dim of the fusion) -> z (B, dim) -> a loss per row and k (n,)
    """

    encoders_only = True
    weighs_rows = False  # its losses are of pairs of samples
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float = 0.1,
        temperature: float = 0.1,
        dim: int = 128,
        drop: float = 0.2,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_contrast(
            self, weight=weight, dim=dim, temperature=temperature, between_modalities=False
        )
        self.require(0 <= drop < 1, f"drop={drop:g}; it must be in [0, 1)")
        self.weight, self.temperature, self.drop = weight, temperature, drop
        for name, encoder in inputs.model.named_encoders():
            self.require(
                varies(encoder, drop),
                f"two views of {name!r} would be equal: its encoder neither augments nor has"
                " dropout; set --data.augment, or its dropout, or leave the modality out",
            )
        layers: list[nn.Module] = []
        for width in (self.fusion.dim, dim):
            layers += [nn.Linear(width, dim), nn.LayerNorm(dim), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(dim, dim))

    def views(self, batch: Batch, rows: Tensor, context: StepContext) -> tuple[Batch, Batch]:
        second = batch.inputs if batch.second is None else batch.second
        first_view, second_view = (
            batch._replace(
                inputs=self._drop_numbers(inputs, rows, int(context.epoch), number), second=None
            )
            for number, inputs in enumerate((batch.inputs, second))
        )
        return first_view, second_view

    def _drop_numbers(
        self, inputs: Mapping[str, Inputs], rows: Tensor, epoch: int, view: int
    ) -> dict[str, Inputs]:
        """Set random numbers to 0, by draws that depend on sample, epoch and view alone."""
        changed = dict(inputs)
        for column, (name, encoder) in enumerate(self.model.named_encoders()):
            current = inputs[name]
            if encoder.kind not in NUMERIC or not self.drop or isinstance(current, Features):
                continue
            generator, values = torch.Generator(), current["values"].clone()
            for place, row in enumerate(rows.tolist()):
                key = (epoch, view, column, row)
                generator.manual_seed(seed_of(self.seed, self.name, *key))
                dropped = torch.rand(values.shape[1:], generator=generator) < self.drop
                values[place].masked_fill_(dropped, 0)
            changed[name] = {**current, "values": values}
        return changed

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        present = presence(context.features)
        embeddings = {
            f"{number} {name}": vectors
            for number, features in enumerate(context.views)
            for name, vectors in self.embed_subsets(features).items()
        }
        rows, present = gathered_rows(embeddings, present, self.world)
        several = present.sum(1) > 1
        masks = {"": present.any(1)}
        masks |= {n: p & several for n, p in zip(self.widths, present.unbind(1), strict=True)}
        terms = {}
        for name, mask in masks.items():
            values = torch.stack(
                [
                    nt_xent(
                        rows[f"{view} {name}"][mask], rows[f"{1 - view} "][mask], self.temperature
                    )
                    for view in (0, 1)
                ]
            ).mean(0)
            if not len(values):
                values = 0.0 * rows["0 "].sum()[None]
            weight = self.weight / len(masks)
            terms[f"{self.name}/{name or 'all'}"] = LossTerm.everywhere(values, weight)
        return terms

    def embed_subsets(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return unit vectors z of the fusion of all modalities, "", and of each: (B, dim)."""
        subsets = {"": dict(features), **{name: keep_only(features, name) for name in features}}
        return {
            name: F.normalize(
                at_least_float32(self.head(fuse_quietly(self.fusion, subset).embedding)), dim=1
            )
            for name, subset in subsets.items()
        }


def varies(encoder: Encoder, drop: float) -> bool:
    """Whether two views of an encoder's input may differ."""
    if encoder.kind in NUMERIC and drop > 0:
        return True
    dropouts = [x for x in encoder.modules() if isinstance(x, nn.Dropout) and x.p > 0]
    if dropouts and not encoder.frozen:
        return True
    if encoder.kind not in EXAMPLES:
        return encoder.kind not in NUMERIC  # what an audio processor crops depends on the clip
    return encoder.loader_processor(train=True).varies(EXAMPLES[encoder.kind])
