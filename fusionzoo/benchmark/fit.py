"""Train one model, or the seeds of a small one at once, on data that is in memory already.

Shapes: `S` seeds trained together, `B` samples of a step, `K` outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fusionzoo.config import BenchmarkConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion
from fusionzoo.fusion.base import RunningMeans
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features, FusionOutput, StepContext
from fusionzoo.training.freezing import frozen_in_phase
from fusionzoo.training.optim.optimizers import build_optimizer, set_rates
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.optim.schedules import phased

Given = Mapping[str, Features] | Batch
Weights = dict[str, Tensor]


class Feed(Protocol):
    """Where the samples of a step come from."""

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Given]:
        """Yield what each chunk of rows, (B,) or (S, B), holds; `epoch` -1 means evaluation."""


class Fitted(NamedTuple):
    """What became of one seed."""

    weights: Weights  # of the best epoch
    best_epoch: int
    epochs: int  # until the patience ran out
    loss: float  # of the best epoch, on the validation split


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """(B, K), (B,) -> (B,)."""
    return F.cross_entropy(logits, target, reduction="none")


def outputs(model: FusionModel, given: Given) -> FusionOutput:
    """Run the fusion on cached features, or encoders and fusion on a batch."""
    output: FusionOutput = model(given) if isinstance(given, Batch) else model.fusion(given)
    return output


class Single:
    """One model and its optimiser."""

    def __init__(
        self,
        model: FusionModel,
        cfg: BenchmarkConfig,
        targets: Tensor,
        groups: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.model, self.cfg = model, cfg
        self.phases = model.fusion.phases
        self.memory = model.fusion.prepare(targets.cpu(), groups, seed)
        if self.memory is not None:
            self.memory.to(targets.device)
        self.optimizer = build_optimizer(param_groups(model, nn.ModuleDict(), cfg.optim), cfg.optim)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.resting = [frozen_in_phase(model, phase) for phase in self.phases]

    def step(self, given: Given, rows: Tensor, target: Tensor, epoch: float, phase: int) -> None:
        """Learn from one batch; rows and target (1, B)."""
        output = outputs(self.model, given)
        moment = StepContext(
            rows=rows[0], epoch=epoch, phase=phase, criterion=cross_entropy, memory=self.memory
        )
        self.model.fusion.loss(output, target[0], moment).mean().backward()
        for parameter in self.resting[phase]:
            parameter.grad = None
        if self.cfg.optim.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.cfg.optim.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set training or evaluation mode; encoders that rest in a phase stay in evaluation."""
        self.model.train(mode)
        self.model.encoders.train(mode and self.phases[phase].encoders)

    def logits(self, given: Given) -> Tensor:
        """Return (1, B, K)."""
        return outputs(self.model, given).logits[None]

    def weights(self, number: int) -> Weights:
        """Copy the weights of one seed."""
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}


class Stack:
    """Several copies of one fusion, each with its own weights and batches, trained as one.

    Parameters are stacked along a new first dimension and the forward pass is mapped over it
    (`torch.func.vmap`), so a step costs about as many kernel calls as that of a single copy. Adam
    works element by element and each copy is clipped by its own norm, so every copy learns what it
    would have learned alone, up to rounding.
    """

    def __init__(self, models: Sequence[FusionModel], cfg: BenchmarkConfig) -> None:
        self.cfg = cfg
        fusions = [model.fusion for model in models]
        self.stacked, self.buffers = stack_module_state(list(fusions))
        self.skeleton = copy.deepcopy(fusions[0]).to("meta")
        self.phases = fusions[0].phases
        name_of = {id(p): name for name, p in fusions[0].named_parameters()}
        groups = param_groups(models[0], nn.ModuleDict(), cfg.optim)
        for group in groups:
            group["params"] = [self.stacked[name_of[id(p)]] for p in group["params"]]
        self.optimizer = build_optimizer(groups, cfg.optim)

    def step(self, given: Given, rows: Tensor, target: Tensor, epoch: float, phase: int) -> None:
        """Learn from one batch for each copy; rows and target (S, B)."""
        logits = self.logits(given)
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).mul(len(target)).backward()
        if self.cfg.optim.clip is not None:
            self._clip(self.cfg.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set training or evaluation mode."""
        self.skeleton.train(mode)

    def logits(self, given: Given) -> Tensor:
        """Return (S, B, K)."""

        def one(parameters: Weights, buffers: Weights, features: Given) -> Tensor:
            output: FusionOutput = functional_call(
                self.skeleton, (parameters, buffers), (features,)
            )
            return output.logits

        return vmap(one)(self.stacked, self.buffers, given)

    def weights(self, number: int) -> Weights:
        """Copy the weights of one seed, under the names of a FusionModel."""
        both = {**self.stacked, **self.buffers}
        return {f"fusion.{name}": x[number].detach().clone() for name, x in both.items()}

    def _clip(self, largest: float) -> None:
        grads = [p.grad for p in self.stacked.values() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
        factor = (largest / (norms + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(factor.reshape(-1, *[1] * (grad.ndim - 1)))


def stackable(fusion: Fusion, features: Mapping[str, Features]) -> bool:
    """Whether copies trained together equal copies trained alone: no chance in the forward pass, no
    loss, memory or phases of its own, no buffers but running means, pooled features only (where it
    is also faster)."""
    plain = type(fusion).loss is Fusion.loss and type(fusion).prepare is Fusion.prepare
    means = {b for m in fusion.modules() if isinstance(m, RunningMeans) for b in m.buffers()}
    if not plain or len(fusion.phases) > 1 or set(fusion.buffers()) - means:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        one, two = fusion.train()(features), fusion(features)
    return bool(torch.equal(one.logits, two.logits))


def fit(
    trainee: Single | Stack,
    feed: Feed,
    targets: Tensor,
    train: Tensor,
    val: Tensor,
    seeds: Sequence[int],
) -> list[Fitted]:
    """Train until the patience of every seed has run out; each keeps its best epoch.

    `targets` are those of all rows; `train` and `val` are rows. Every seed has its own order of
    samples. A fusion that trains in phases is judged in the last one only.
    """
    cfg = trainee.cfg
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    steps = math.ceil(len(train) / cfg.batch_size)
    plan = phased(cfg.optim, trainee.phases, cfg.epochs * steps, steps)
    best: list[Fitted | None] = [None] * len(seeds)
    ended = [cfg.epochs] * len(seeds)
    alone = isinstance(trainee, Single)
    for epoch in range(cfg.epochs):
        places = torch.stack([torch.randperm(len(train), generator=draw) for draw in orders])
        chunks = places.split(cfg.batch_size, dim=1)
        rows = [train[chunk[0] if alone else chunk] for chunk in chunks]
        mode = -1
        for number, given in enumerate(feed(rows, epoch)):
            phase, factors = plan(epoch * steps + number)
            if phase != mode:
                trainee.train(True, phase)
                mode = phase
            set_rates(trainee.optimizer, factors)
            target = targets[train[chunks[number]]]
            place = chunks[number].to(target.device)
            trainee.step(given, place, target, epoch + number / steps, phase)
        if mode < len(trainee.phases) - 1:
            continue
        for number, loss in enumerate(validate(trainee, feed, targets, val, len(seeds))):
            held = best[number]
            if ended[number] <= epoch:
                continue
            if held is None or loss < held.loss:
                best[number] = Fitted(trainee.weights(number), epoch + 1, 0, loss)
            elif cfg.patience is not None and epoch + 1 - held.best_epoch >= cfg.patience:
                ended[number] = min(ended[number], epoch + 1)
        if all(end <= epoch + 1 for end in ended):
            break
    found = [one._replace(epochs=end) for one, end in zip(best, ended, strict=True) if one]
    for seed, one in zip(seeds, found, strict=True):
        if not math.isfinite(one.loss):
            raise FusionZooError(
                f"seed {seed}: the validation loss is {one.loss}; a lower --optim.lr may help"
            )
    return found


@torch.no_grad()
def validate(
    trainee: Single | Stack, feed: Feed, targets: Tensor, val: Tensor, seeds: int
) -> list[float]:
    """Return each seed's mean cross-entropy on the validation split."""
    trainee.train(False)
    total = torch.zeros(seeds, dtype=torch.float64)
    chunks = val.split(512)
    alone = isinstance(trainee, Single)
    asked = [chunk if alone else chunk.expand(seeds, -1) for chunk in chunks]
    for chunk, given in zip(chunks, feed(asked, -1), strict=True):
        logits = trainee.logits(given)
        total += torch.stack([cross_entropy(own, targets[chunk]).double().sum() for own in logits])
    return (total / len(val)).tolist()
