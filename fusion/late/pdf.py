"""Predictive dynamic fusion: weights from predicted confidence, one's own and the others'."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, masked_softmax, present_mean
from ._base import LateFusion

EDGE = 1e-6  # smallest distance of a confidence from 0 and 1


@FUSIONS.register(
    family="late", paper="Cao et al. 2024, arXiv:2406.04802", reads="pooled", synergy=False
)
class PDF(LateFusion):
    """Weight each modality's logits by its predicted confidence and by the others' lack of it.

    z_m is one linear map of x_m, as in the authors' code; with `project`, x_m is V_m x_m here and
    below. A confidence head predicts the probability of the true class, t_m = sigmoid(g_m(x_m)),
    x_m detached in training. With l = -log t, h_m = sum_(n != m) l_n / sum_n l_n and b_m = t_m +
    h_m; w = softmax over present m of b_m; logits = sum_m w_m z_m, w detached in training.
    Evaluation first multiplies b_m by k_m = min(1, v_m / mean of the others' v_n), v_m = mean over
    classes of |softmax(z_m) - 1 / K| (relative calibration). Loss: CE(logits) + sum_m CE(z_m) +
    sum_m |t_m - softmax(z_m)_y|, the target of t_m detached. Differs from the authors' code, which
    has two modalities, no activation in g_m, and layers in it as wide as x_m and twice that (here
    `dim` and 2 `dim`); the sums for more modalities are ours and equal theirs for two.

    Missing: left out of all sums, of the calibration and of the loss; the weight of a single
    present modality is 1. The authors' code knows no missing modality.
    Pitfall: the weights lie within a softmax of numbers from 0 to 2, so no modality is ever
    silenced. Validation uses the calibrated rule too, other than in the authors' code.
    Use when: quality varies from sample to sample and each modality alone classifies well.

    Settings:
        calibrate: whether evaluation uses relative calibration
        linear_confidence: whether g_m has no activations, as in the authors' code; three linear
            layers are then one

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
    """

    classes_only = True
    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        project: bool = False,
        calibrate: bool = True,
        linear_confidence: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        self.calibrate = calibrate
        activation = nn.Identity if linear_confidence else nn.GELU
        self.confidence = nn.ModuleDict(
            {
                name: nn.Sequential(
                    *(nn.Linear(width, 2 * dim), activation()),
                    *(nn.Linear(2 * dim, dim), activation()),
                    nn.Linear(dim, 1),
                )
                for name, width in self.read_widths.items()
            }
        )

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        embedding = self.or_null(present_mean(aligned, present), present)
        read = self.head_inputs(features, aligned)
        unimodal = self.classify(read, present, self.linear_logits(features))
        seen = [x.detach() for x in read] if self.training else read
        pairs = zip(self.confidence.values(), seen, strict=True)
        confidence = torch.cat([head(x) for head, x in pairs], dim=1).sigmoid()
        edge = max(EDGE, torch.finfo(confidence.dtype).eps)  # in bfloat16, 1 - EDGE is 1
        confidence = confidence.clamp(edge, 1 - edge)
        belief = co_belief(confidence, present)
        if self.calibrate and not self.training:
            belief = relative_calibration(unimodal, present) * belief
        weights = masked_softmax(belief, present)
        weights = weights.detach() if self.training else weights
        logits = (weights[..., None] * unimodal).sum(1)
        extra = {"confidence": confidence}
        return self.output(embedding, logits, unimodal, present, weights, **extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        present, confidence = output.extra["present"], output.extra["confidence"].float()
        losses = []
        for logits, t in zip(output.unimodal.values(), confidence.unbind(1), strict=True):
            probability = logits.detach().float().softmax(-1).gather(1, target[:, None])[:, 0]
            error = context.weighted((t - probability).abs())
            losses.append(context.criterion(logits, target) + error)
        unimodal_loss = torch.stack(losses, dim=1).masked_fill(~present, 0).sum(1)
        return context.criterion(output.logits, target) + unimodal_loss


def co_belief(confidence: Tensor, present: Tensor) -> Tensor:
    """Return t_m + h_m, h_m the others' share of the logarithms of t: (B, M) x 2 -> (B, M)."""
    surprise = (-confidence.log()).masked_fill(~present, 0)
    total = surprise.sum(1, keepdim=True)
    floor = torch.finfo(total.dtype).tiny
    others = (total - surprise) / total.clamp(min=floor)
    several = present.sum(1, keepdim=True) > 1
    return confidence + others.masked_fill(~several, 0)


def relative_calibration(unimodal: Tensor, present: Tensor) -> Tensor:
    """Return k_m = min(1, v_m / mean of the others' v_n), 1 for 0 / 0: (B, M, K), (B, M)."""
    classes, count = unimodal.shape[-1], unimodal.shape[1]
    certainty = (unimodal.softmax(-1) - 1 / classes).abs().mean(-1)
    others = present[:, None] & ~torch.eye(count, dtype=torch.bool, device=present.device)
    mean = present_mean(
        certainty[:, None].expand(-1, count, -1).flatten(0, 1), others.flatten(0, 1)
    ).reshape(certainty.shape)
    less = certainty < mean
    return torch.where(less, certainty / torch.where(less, mean, 1), 1)
