"""Product of experts: multiply the modalities' probabilities and divide by the shared prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._base import LateFusion


@FUSIONS.register(
    family="late", paper="Hinton 2002, Neural Computation 14(8)", reads="pooled", synergy=False
)
class LatePoE(LateFusion):
    """Add the modalities' log-probabilities, counting the class prior once.

    logits = sum_m beta_m log softmax(z_m) - (sum_m beta_m - 1) log prior, over present m. With
    beta_m = 1 and the true prior this is the exact posterior if the modalities are independent
    given the class. A modality that predicts the prior changes nothing, and a sample without any
    modality is answered with the prior, which is a buffer.

    Missing: contributes no factor, and the prior is divided out once less.
    Pitfall: evidence shared by several modalities is counted repeatedly, which makes the result
    overconfident; use `beta="mean"`.
    Use when: modalities are nearly independent given the class.

    Settings:
        beta: weight of each modality: "one", or "mean" for 1 / number of present modalities, which
            makes the result a geometric mean
        prior: class prior: "uniform", or "train" for the class frequencies of the training split

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
        project: bool = True,
        beta: Literal["one", "mean"] = "one",
        prior: Literal["uniform", "train"] = "uniform",
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        check_choice("beta", beta, ("one", "mean"))
        check_choice("prior", prior, ("uniform", "train"))
        self.beta, self.prior = beta, prior
        del self.prior_logits  # replaced by the buffer `log_prior`
        self.register_buffer("log_prior", torch.full((num_outputs,), 1 / num_outputs).log())

    def prepare(self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0) -> None:
        if self.prior == "train":
            counts = torch.bincount(targets, minlength=self.num_outputs) + 1  # no log of 0
            self.log_prior.copy_((counts / counts.sum()).log())

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        log_probabilities = unimodal.log_softmax(-1)
        beta = present.to(unimodal.dtype)
        if self.beta == "mean":
            beta = beta / beta.sum(1, keepdim=True).clamp(min=1)
        log_prior = self.log_prior.to(unimodal.dtype)
        log_product = (beta[..., None] * log_probabilities).sum(1)
        logits = log_product - (beta.sum(1, keepdim=True) - 1) * log_prior
        return FusionOutput(
            embedding, logits, dict(zip(self.dims, unimodal.unbind(1), strict=True)), None
        )
