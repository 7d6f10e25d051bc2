"""Discounted belief fusion: modalities that conflict lose belief to uncertainty."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusionzoo.errors import check_number

from ..base import FUSIONS
from ._conflict import AveragedEvidence


@FUSIONS.register(
    family="late",
    paper="Bezirganyan et al. 2025, AISTATS, PMLR 258",
    reads="pooled",
    synergy=False,
)
class DBF(AveragedEvidence):
    """Average the modalities' evidence after discounting those that conflict with the others.

    Linear maps of x_m, evidence e_m, u_m, conflict c_mn and loss are those of `ecml`. Before the
    average, e_m is discounted by its agreement eta_m = prod_(n != m) (1 - c_mn^kappa)^(1 / kappa):
    e'_m = K eta_m e_m / (K + (1 - eta_m) sum e_m), which moves a share 1 - eta_m of its belief to
    uncertainty; logits = log(1 + mean of e'_m). Differs from the authors' code, which adds 1e-6 to
    every conflict and so discounts equal modalities too.

    Missing: left out of products, mean and loss.
    Pitfall: with many modalities, one outlier discounts all of them a little. Accuracy is that of
    `ecml`.
    Use when: disagreement between modalities must show up as high uncertainty.

    Settings:
        kappa: how sharply conflict discounts, at least 1; larger values forgive small conflicts

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)},
            weights (B, M): eta_m (1 - u_m), normalised to sum 1; extra uncertainty (B,), conflict
            (B, M, M)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        project: bool = False,
        kappa: float = 1.0,
        annealing_epochs: int = 50,
        conflict: float = 1.0,
        penalise_missing: bool = False,
    ) -> None:
        super().__init__(
            dims,
            dim,
            num_outputs,
            project=project,
            annealing_epochs=annealing_epochs,
            conflict=conflict,
            penalise_missing=penalise_missing,
        )
        check_number("kappa", kappa, 1)
        self.kappa = kappa

    def trust(self, conflict: Tensor) -> Tensor:
        """Return eta_m = prod_n (1 - c_mn^kappa)^(1 / kappa); c_mm is 0."""
        floor = torch.finfo(conflict.dtype).tiny
        agreement = (1 - conflict**self.kappa).clamp(min=floor) ** (1 / self.kappa)
        return agreement.prod(-1)
