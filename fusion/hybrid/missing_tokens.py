"""Missing tokens: a learned stand-in for each absent modality, in front of any fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from einops import repeat
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

from ..base import FUSIONS, Fusion, check_choice, combination_of


@FUSIONS.register(family="hybrid", paper="Lee et al. 2023, arXiv:2303.03369", reads="tokens")
class MissingTokens(Fusion):
    """Replace an absent modality by learned tokens, and let another fusion believe it is there.

    Tokens and pooled vectors are aligned to `dim`; an absent m is given e_m (`num_tokens`, dim),
    its pooled vector their mean; then the fusion `base` runs, with every further setting given
    here. `bank="pattern"` adds to e_m a correction for each combination of present modalities,
    which starts at 0, so a combination never seen falls back to e_m. (The cited paper prompts the
    encoder; this is its form behind the encoder.)

    Missing: replaced by learned tokens. Nothing at all: the base's `null`.
    Pitfall: stand-ins learn only from samples that lack something: train with missing data.
    Use when: a fusion without an opinion on missing modalities must live with them.

    Shapes:
        features[name].tokens: (B, T, dims[name]), pooled (B, dims[name])
        returns: what the base returns, without its weights
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        base: str = "concat_transformer",
        bank: Literal["modality", "pattern"] = "modality",
        num_tokens: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("bank", bank, ("modality", "pattern"))
        del self.null  # the base has its own
        self.project = self.align()
        self.stand_in = nn.Parameter(torch.randn(len(dims), num_tokens, dim) * 0.02)
        patterns = 2 ** len(dims)
        self.correction = (
            nn.Parameter(torch.zeros(patterns, *self.stand_in.shape)) if bank == "pattern" else None
        )
        self.base = FUSIONS.create(base, dict.fromkeys(dims, dim), dim, num_outputs, **settings)
        self.classes_only, self.ignores = self.base.classes_only, self.base.ignores

    @property
    def phases(self) -> tuple[Phase, ...]:  # type: ignore[override]
        own = ("project", "stand_in", *(["correction"] if self.correction is not None else []))
        return tuple(
            phase._replace(trains=(*own, *(f"base.{name}" for name in phase.trains)))
            for phase in self.base.phases
        )

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        output: FusionOutput = self.base(self.filled(features))
        absent = dict(zip(self.dims, (~present).unbind(1), strict=True))
        own = {m: z.masked_fill(absent[m][:, None], 0) for m, z in output.unimodal.items()}
        extra = {**output.extra, "present": present}
        return FusionOutput(output.embedding, output.logits, own, None, extra)

    def filled(self, features: Mapping[str, Features]) -> dict[str, Features]:
        """Return the aligned features, with stand-ins where a modality is absent."""
        present = self.present(features)
        fill = ~present & present.any(1, keepdim=True)
        stand_ins = self.stand_in.expand(len(present), -1, -1, -1)
        if self.correction is not None:
            stand_ins = stand_ins + self.correction[combination_of(~present)]
        tokens, pooled = self.tokens(features), self.pooled(features)
        made = {}
        for column, (name, align) in enumerate(self.project.items()):
            own, here = stand_ins[:, column], fill[:, column, None]
            real = repeat(here, "b 1 -> b n", n=own.shape[1])
            x = align(tokens[name])
            made[name] = Features(
                torch.cat([x, own.to(x.dtype)], dim=1),
                torch.cat([features[name].mask, real], dim=1),
                torch.where(here, own.mean(1).to(x.dtype), align(pooled[name])),
            )
        return made

    def prepare(
        self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0
    ) -> nn.Module | None:
        return self.base.prepare(targets, groups, seed)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        return self.base.loss(output, target, context)
