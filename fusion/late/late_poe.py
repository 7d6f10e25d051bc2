"""Product of experts: multiply the modalities' probabilities, divide out the shared prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, check_choice
from ._base import LateFusion


@FUSIONS.register(
    family="late", paper="Hinton 2002, Neural Computation 14(8)", reads="pooled", synergy=False
)
class LatePoE(LateFusion):
    """Add the modalities' log-probabilities, counting the class prior once.

    logits = sum_m beta_m log softmax(z_m) - (sum_m beta_m - 1) log prior, over what is present.
    With the true prior it is the exact posterior where modalities are independent given the class.
    `beta="one"` takes each expert whole; `beta="mean"` (1 / number present) is the geometric mean,
    for experts that repeat one another. `log_prior` is a buffer, uniform, or with
    `prior="train"` the class frequencies of the training split; an expert with the prior as its
    opinion then changes nothing, and no expert at all answers with the prior.

    Missing: contributes no factor, and the prior is divided out once less.
    Pitfall: experts that repeat one another are counted twice and overconfident; `beta="mean"`.
    Use when: modalities are nearly independent given the class.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    classes_only = True
    symmetric = True

    log_prior: Tensor

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        beta: Literal["one", "mean"] = "one",
        prior: Literal["uniform", "train"] = "uniform",
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("beta", beta, ("one", "mean"))
        check_choice("prior", prior, ("uniform", "train"))
        self.beta, self.prior = beta, prior
        del self.prior_logits  # here the prior is known, not learned
        self.register_buffer("log_prior", torch.full((num_outputs,), 1 / num_outputs).log())

    def prepare(self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0) -> None:
        if self.prior == "train":
            counts = torch.bincount(targets, minlength=self.num_outputs) + 1  # none is impossible
            self.log_prior.copy_((counts / counts.sum()).log())

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        experts = votes.log_softmax(-1)
        beta = present.to(votes.dtype)
        if self.beta == "mean":
            beta = beta / beta.sum(1, keepdim=True).clamp(min=1)
        prior = self.log_prior.to(votes.dtype)
        opinion = (beta[..., None] * experts).sum(1)
        logits = opinion - (beta.sum(1, keepdim=True) - 1) * prior
        return FusionOutput(
            embedding, logits, dict(zip(self.dims, votes.unbind(1), strict=True)), None
        )
