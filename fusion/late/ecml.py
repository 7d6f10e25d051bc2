"""ECML: average the modalities' evidence, and train them to agree."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import FUSIONS
from ._conflict import AveragedEvidence


@FUSIONS.register(
    family="late", paper="Xu et al. 2024, arXiv:2402.16897", reads="pooled", synergy=False
)
class ECML(AveragedEvidence):
    """Average the modalities' Dirichlet evidence; in training, penalise confident disagreement.

    z_m is one linear map of x_m, as in the authors' code (`project` puts V_m before it). e_m =
    softplus(z_m), alpha_m = e_m + 1, S_m = sum alpha_m, u_m = K / S_m, e = mean of the e_m of the P
    present modalities; logits = log(1 + e). The average of evidence is that of opinions, and the
    uncertainty u, in `extra`, is the harmonic mean of the u_m. Loss: mean of the evidential losses
    of `tmc` for e and every e_m + `conflict` / (P - 1) sum_m sum_(n != m) c_mn, c_mn = |alpha_m /
    S_m - alpha_n / S_n|_1 / 2 (1 - u_m)(1 - u_n). Differs from the authors' code, which averages
    one view after the other, (e_1 + e_2) / 2 and so on, so that the last counts half.

    Missing: left out of the mean and of the loss.
    Pitfall: two modalities that are sure of different classes look certain: u is small. `dbf`
    makes it large. Accuracy is below that of `late_mean` where no input is corrupted.
    Use when: a corrupted modality must not outvote the others, as it does in `tmc`.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)},
            weights (B, M): 1 - u_m, normalised to sum 1; extra uncertainty (B,), conflict (B, M, M)
    """

    def trust(self, conflict: Tensor) -> Tensor:
        return torch.ones_like(conflict[:, 0])
