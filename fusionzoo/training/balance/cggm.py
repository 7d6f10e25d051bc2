"""Classifier-guided gradient modulation: scale each encoder's gradient by what the others gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.machine.distributed import total
from fusionzoo.structures import StepContext
from fusionzoo.targets import AnyOf, Level, Number, Target

from ._shared import BatchSum, sums_of_rows
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of

EPSILON = 1e-30  # of a product of squared norms; below it a gradient has no direction


@BALANCE.register(family="gradient", paper="Guo et al. 2024, NeurIPS, arXiv:2411.01409")
class CGGM(Balance):
    """Scale each encoder's gradient by the share of progress that is not its own.

    Linear classifiers h_m on detached features; a_m = their score over the last `window` updates
    and all processes (share of right classes, labels or levels; of numbers on the right side of the
    training mean), gain_m = a_m less that of the `window` updates before. B_m = 1 - gain_m / sum_n
    gain_n, (M - 1) / M until 2 `window` updates are known; g_m <- rho B_m g_m. Direction: with G_m,
    G the gradients of h_m's weight and of a linear layer from the fused embedding to the logits,
    both (K, D), mean_m (|B_m| - B_m cos(G_m, G)) joins the loss, G_m detached, B of the update
    before. Differs from the authors' code: cosines of gradients instead of weights; linear
    classifiers; a window, and B clipped to [0, M - 1], because a quotient of noise turns gradient
    descent into ascent; any number of modalities.

    Missing: a row counts for the modalities it has; a modality without rows in a window gains 0.
    Pitfall: the direction applies to modalities whose features are as wide as the fused embedding,
    and needs one at least to have an effect (the log then has cggm/direction); it is computed per
    accumulated batch. Adam largely cancels a constant B.
    Use when: one modality converges first and the target is not one class, so that neither ogm_ge
    nor opm applies.

    Settings:
        rho: scale of all encoders' gradients, above 0 (paper: 1.3; segmentation: 1)
        direction: weight of the direction loss, at least 0 (paper: 0.05 to 0.2, by data set)
        window: updates whose scores are compared with as many before, at least 1 (authors: 1)
        clamp: whether B stays in [0, M - 1] (authors: False)

    Shapes: scores (2, M) -> B (M,); dl/dlogits (B, K), features (B, D) -> G (K, D)
    """

    raw_inputs = False
    surgery = True
    lr_scale = 0.5  # authors: 5e-4 for the classifiers, 1e-3 for the model
    sums: Tensor
    updates: Tensor
    factors: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        rho: float = 1.3,
        direction: float = 0.1,
        window: int = 20,
        clamp: bool = True,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(rho > 0, f"rho={rho:g}; it must be positive")
        self.require(direction >= 0, f"direction={direction:g}; it must be at least 0")
        self.require(window >= 1, f"window={window}; it must be at least 1")
        count = len(self.widths)
        self.require(count > 1, "it compares modalities, and the model has only one")
        self.require(inputs.model.targets != [], "it scores answers, and the run has no target")
        self.rho, self.direction, self.window, self.clamp = rho, direction, window, clamp
        outputs = self.fusion.num_outputs
        self.heads = nn.ModuleDict({n: nn.Linear(w, outputs) for n, w in self.widths.items()})
        self.tally = BatchSum()  # points, labelled rows: (2, M)
        zeros = torch.zeros(2 * window, 2, count, dtype=torch.float64)
        self.register_buffer("sums", zeros)  # of the last updates, in a ring
        self.register_buffer("updates", torch.tensor(0))
        equal = torch.full((count,), (count - 1) / count, dtype=torch.float64)
        self.register_buffer("factors", equal)  # B of the last update

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        target, targets = context.batch.target, self.model.targets
        assert target is not None
        terms: dict[str, LossTerm] = {}
        scores: list[Tensor] = []
        gradients: list[Tensor | None] = []  # by modality; None where the width differs
        for name, head in self.heads.items():
            x, present = pooled_of(context.features, name)
            x = x.detach()
            logits = head(x)
            terms[f"{self.name}/{name}"] = LossTerm(context.criterion(logits, target), present)
            points, labelled = points_of(at_least_float32(logits.detach()), target, targets)
            labelled = labelled & present
            scores.append(sums_of_rows(points, labelled, context))
            gradient = None
            if self.direction and x.shape[1] == self.fusion.dim:
                leaf = logits.detach().requires_grad_()
                slope = slopes(leaf, context, create_graph=False).where(present[:, None], 0)
                gradient = layer_gradient(slope, x)
            gradients.append(gradient)
        self.tally.add(torch.stack(scores, dim=1).double(), context)
        known = any(gradient is not None for gradient in gradients)
        if known and context.output.logits.requires_grad:
            terms[f"{self.name}/direction"] = self._direction_loss(gradients, context)
        return terms

    def _direction_loss(self, gradients: list[Tensor | None], context: StepContext) -> LossTerm:
        """Return the direction loss as a single value, the same on every process."""
        slope = slopes(context.output.logits, context, create_graph=True)
        fused = self._sum_with_gradient(layer_gradient(slope, context.output.embedding))
        used = [m for m, gradient in enumerate(gradients) if gradient is not None]
        single = total(torch.stack([g for g in gradients if g is not None]), self.world)
        factors = self.factors[used].to(fused.device)
        value = misdirection(factors, single, fused).to(at_least_float32(slope).dtype)[None]
        return LossTerm.everywhere(value, self.direction, by_row=False)

    def _sum_with_gradient(self, x: Tensor) -> Tensor:
        """Sum over the processes; the gradient of this process's part stands for its rows, and is
        scaled up because training averages gradients over the processes."""
        if self.world.size == 1:
            return x
        return total(x.detach().clone(), self.world) + self.world.size * (x - x.detach())

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        number = int(self.updates)
        self.sums[number % len(self.sums)] = self.tally.take(self.world).to(self.sums)
        self.updates += 1
        factors = modulation(self._gains(), clamp=self.clamp)
        self.factors.copy_(factors)
        for factor, parameters in zip(factors.tolist(), encoders.values(), strict=True):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.rho * factor)

    def _gains(self) -> Tensor:
        """Return how much each score rose from one window to the next, 0 if not known: (M,)."""
        number = int(self.updates)
        if number < 2 * self.window:
            return torch.zeros_like(self.factors)
        ages = torch.arange(number - 2 * self.window, number, device=self.sums.device)
        windows = self.sums[ages % len(self.sums)].unflatten(0, (2, self.window)).sum(1)
        points, rows = windows.unbind(1)  # (2, M): the window before, the last
        before, last = points / torch.where(rows > 0, rows, 1)
        return torch.where((rows > 0).all(0), last - before, 0)


def modulation(gains: Tensor, *, clamp: bool) -> Tensor:
    """Return B from the gain of each modality; equal gains where their sum is 0: (M,) -> (M,)."""
    count = len(gains)
    if gains.sum() == 0:
        return torch.full_like(gains, (count - 1) / count)
    factors = 1 - gains / gains.sum()
    return factors.clamp(0, count - 1) if clamp else factors


def misdirection(factors: Tensor, single: Tensor, fused: Tensor) -> Tensor:
    """Return mean_m (|B_m| - B_m cos(G_m, G)): (M,), (M, K, D), (K, D) -> ().

    Gradients of zero have no direction, and count as 0.
    """
    products = (single * fused).sum((1, 2))
    norms = single.square().sum((1, 2)) * fused.square().sum()
    cosines = products / norms.clamp(min=EPSILON).sqrt()
    return torch.where(norms > EPSILON, factors.abs() - factors * cosines, 0 * products).mean()


def slopes(logits: Tensor, context: StepContext, *, create_graph: bool) -> Tensor:
    """Return each row's derivative of the loss by its logits, p - y for a cross-entropy: (B, K)."""
    assert context.batch.target is not None
    with torch.enable_grad():
        losses = context.criterion(logits, context.batch.target)
        if context.sample_weight is not None:
            losses = context.sample_weight * losses
        loss = losses.sum()
    return torch.autograd.grad(loss, logits, create_graph=create_graph)[0]


def layer_gradient(slope: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a linear layer's weight: (B, K), its inputs (B, D) -> (K, D)."""
    with torch.autocast(slope.device.type, enabled=False):
        return slope.double().T @ x.double()


def points_of(
    logits: Tensor, target: Tensor, targets: Sequence[Target] | None
) -> tuple[Tensor, Tensor]:
    """Return how far each row's answer is right, from 0 to 1, and whether it has a label.

    Of several targets: the mean over those with a label. (B, K), labels -> (B,), (B,) bool.
    """
    if targets is None:
        return (logits.argmax(1) == target).double(), torch.ones_like(target, dtype=torch.bool)
    points, labelled = torch.zeros_like(logits[:, 0]).double(), torch.zeros_like(logits[:, 0])
    columns = target.split([x.columns for x in targets], dim=1)
    for kind, answer, label in zip(
        targets, logits.split([x.width for x in targets], dim=1), columns, strict=True
    ):
        known = ~label.isnan().any(1)
        if isinstance(kind, AnyOf):
            right = ((answer > 0) == (label > 0.5)).double().mean(1)
        elif isinstance(kind, Number):  # standardised: 0 is the mean
            right = (answer.sign() == label.sign())[:, 0].double()
        elif isinstance(kind, Level):
            right = (kind.rank(answer) == label[:, 0]).double()
        else:
            right = (answer.argmax(1) == label[:, 0]).double()
        points = points + right.where(known, 0)
        labelled = labelled + known
    return points / labelled.clamp(min=1), labelled > 0
