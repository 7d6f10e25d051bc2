"""Deep canonical correlation analysis: correlate the features of pairs of modalities."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from fusionzoo.machine.distributed import gathered_rows
from fusionzoo.structures import StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of, presence


@BALANCE.register(family="loss", paper="Andrew et al. 2013, ICML, proceedings v28")
class CCALoss(Balance):
    """Maximise the canonical correlations of each pair of modalities.

    T = S11^(-1/2) S12 S22^(-1/2) with the covariances of u_m = V_m x_m over the rows that have
    both modalities, S_mm + ridge I; L = - sum of the `top` largest singular values of T, summed
    over pairs. The roots are replaced by Cholesky factors, S = C C': C1^-1 S12 C2^-T has the same
    singular values and needs no derivatives of eigenvectors, which diverge for repeated
    eigenvalues. Computed in double precision over the rows of all processes (but not of accumulated
    batches). Differs from the paper: linear maps to `dim` after any encoder; batches instead of
    the whole data set.

    Missing: a pair uses the rows that have both modalities; with `dim` rows or fewer its loss is 0.
    Pitfall: with few more rows than `dim`, any features correlate: use a batch several times that.
    Use when: modalities are views of the same content and labels are few.

    Settings:
        weight: weight of the loss of each pair, at least 0; 0 switches it off
        dim: dimensions each modality is projected to, at least 1
        ridge: added to the diagonal of the covariances, at least 0
        top: number of largest correlations that count, 1 to `dim`; None for all

    Shapes: features[name].pooled (B, D) -> u (B, dim), one loss for each pair
    """

    encoders_only = True
    raw_inputs = False
    weighs_rows = False  # its loss is of the whole batch
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float = 0.1,
        dim: int = 8,
        ridge: float = 1e-3,
        top: int | None = None,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(dim >= 1, f"dim={dim}; it must be at least 1")
        self.require(ridge >= 0, f"ridge={ridge:g}; it must be at least 0")
        self.require(top is None or 1 <= top <= dim, f"top={top}; it is 1 to dim={dim}")
        self.require(len(self.widths) > 1, "it correlates modalities, and the model has only one")
        self.weight, self.dim, self.ridge, self.top = weight, dim, ridge, top
        self.project = nn.ModuleDict({name: nn.Linear(w, dim) for name, w in self.widths.items()})

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        projected = {}
        for name, project in self.project.items():
            x, _ = pooled_of(context.features, name)
            with torch.autocast(x.device.type, enabled=False):
                projected[name] = project(at_least_float32(x)).double()
        rows, present = gathered_rows(projected, presence(context.features), self.world)
        column = dict(zip(projected, present.unbind(1), strict=True))
        terms = {}
        for a, b in combinations(projected, 2):
            both_present = column[a] & column[b]
            value = -self.correlation(rows[a][both_present], rows[b][both_present])[None]
            terms[f"{self.name}/{a}-{b}"] = LossTerm.everywhere(value, self.weight)
        return terms

    def correlation(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum of the canonical correlations: (n, d), (n, d) -> ()."""
        if len(left) <= left.shape[1]:
            return 0.0 * (left.sum() + right.sum())
        if not (left.isfinite().all() and right.isfinite().all()):
            return left.sum() * torch.nan  # training skips the step, as for any loss
        with torch.autocast(left.device.type, enabled=False):
            left, right = left - left.mean(0), right - right.mean(0)
            cross = self._whiten(left, left.T @ right)
            singular_values = torch.linalg.svdvals(self._whiten(right, cross.T))
            return singular_values[: self.top].sum() / (len(left) - 1)

    def _whiten(self, x: Tensor, cross: Tensor) -> Tensor:
        """Solve C y = cross with C C' the covariance of x (n, d): (d, e) -> (d, e)."""
        ridge = self.ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        factor = torch.linalg.cholesky(x.T @ x / (len(x) - 1) + ridge)
        return torch.linalg.solve_triangular(factor, cross, upper=False)
