"""Missing tokens: replace absent modalities by learned tokens before any other fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from einops import repeat
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Fusion, combination_of


@FUSIONS.register(family="hybrid", paper="Lee et al. 2023, arXiv:2303.03369", reads="tokens")
class MissingTokens(Fusion):
    """Replace absent modalities by learned tokens and fuse by another fusion as if complete.

    Tokens and pooled vectors are projected to `dim`; the tokens of an absent m are e_m (num_tokens,
    dim), its pooled vector is their mean. Then the fusion `base` runs; all further settings are
    passed to it. Differs from the paper, which adds prompts inside the encoder: here the learned
    tokens follow the encoder.

    Missing: replaced by learned tokens; if all modalities are missing, the base's `null`.
    Pitfall: the tokens are only trained by incomplete samples: train with missing data.
    Use when: a fusion that does not handle missing modalities well has to cope with them.

    Settings:
        base: name of the fusion that receives the completed features
        bank: "modality" for tokens e_m per modality; "pattern" adds a correction for each
            combination of present modalities, initialised to 0, so that a combination that never
            occurs in training falls back to e_m
        num_tokens: learned tokens per modality, at least 1

    Shapes:
        features[name].tokens: (B, T, dims[name]), pooled (B, dims[name])
        returns: the output of the base, without its weights
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
        del self.null  # the base's is used
        self.project = self.align()
        self.stand_in = nn.Parameter(torch.randn(len(dims), num_tokens, dim) * 0.02)
        patterns = 2 ** len(dims)
        self.correction = (
            nn.Parameter(torch.zeros(patterns, *self.stand_in.shape)) if bank == "pattern" else None
        )
        self.base = FUSIONS.create(base, dict.fromkeys(dims, dim), dim, num_outputs, **settings)
        self.classes_only, self.ignores = self.base.classes_only, self.base.ignores
        self.last_layers = tuple(f"base.{layer}" for layer in self.base.last_layers)
        correction = ["correction"] if self.correction is not None else []
        added = ("project", "stand_in", *correction)
        self.phases = tuple(
            phase._replace(trains=(*added, *(f"base.{x}" for x in phase.trains)))
            for phase in self.base.phases
        )

    def add_linear_skip(self) -> Self:
        if self.base.joins_linear:
            raise FusionZooError(
                f"linear_skip: missing_tokens does not add it to {type(self.base).__name__}, which"
                " joins logits of several answers; choose another base"
            )
        return super().add_linear_skip()

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        output: FusionOutput = self.base(self.filled(features))
        absent = dict(zip(self.dims, (~present).unbind(1), strict=True))
        unimodal = {m: z.masked_fill(absent[m][:, None], 0) for m, z in output.unimodal.items()}
        extra = {**output.extra, "present": present}
        return FusionOutput(output.embedding, output.logits, unimodal, None, extra)

    def filled(self, features: Mapping[str, Features]) -> dict[str, Features]:
        """Return the projected features, with learned tokens in place of absent modalities."""
        present = self.present(features)
        fill = ~present & present.any(1, keepdim=True)  # modalities to replace
        stand_ins = self.stand_in.expand(present.shape[0], -1, -1, -1)
        if self.correction is not None:
            stand_ins = stand_ins + self.correction[combination_of(~present)]
        tokens, pooled = self.tokens(features), self.pooled(features)
        filled = {}
        for column, (name, project) in enumerate(self.project.items()):
            stand_in, fill_row = stand_ins[:, column], fill[:, column, None]
            stand_in_mask = repeat(fill_row, "b 1 -> b n", n=stand_in.shape[1])
            x = project(tokens[name])
            filled[name] = Features(
                torch.cat([x, stand_in.to(x.dtype)], dim=1),
                torch.cat([features[name].mask, stand_in_mask], dim=1),
                torch.where(fill_row, stand_in.mean(1).to(x.dtype), project(pooled[name])),
            )
        return filled

    def prepare(
        self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0
    ) -> nn.Module | None:
        return self.base.prepare(targets, groups, seed)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        return self.base.loss(output, target, context)
