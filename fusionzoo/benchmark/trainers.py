"""Training steps of one model, or of several copies of a small one at once.

Shapes: `S` seeds trained together, `B` samples of a step, `K` outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fusionzoo.config import BenchmarkConfig
from fusionzoo.fusion import Fusion
from fusionzoo.fusion.base import RunningMeans
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features, FusionOutput, Phase, StepContext
from fusionzoo.training.optim.freezing import frozen_in_phase
from fusionzoo.training.optim.optimizers import build_optimizer
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.tasks.multitask import Tasks, plain_tasks

ModelInput = Mapping[str, Features] | Batch  # cached features, or a batch for the encoders
Weights = dict[str, Tensor]


class Feed(Protocol):
    """Provides the model's input for the rows of each step."""

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[ModelInput]:
        """Yield the input for each chunk of rows, (B,) or (S, B); `epoch` -1 means evaluation."""


def forward(model: FusionModel, model_input: ModelInput) -> FusionOutput:
    """Run the fusion on cached features, or encoders and fusion on a batch."""
    if isinstance(model_input, Batch):
        output: FusionOutput = model(model_input)
    else:
        output = model.fusion(model_input)
    return output


class SingleTrainer:
    """Trains one model."""

    def __init__(
        self,
        model: FusionModel,
        cfg: BenchmarkConfig,
        targets: Tensor,
        groups: Sequence[str] = (),
        seed: int = 0,
        tasks: Tasks | None = None,
    ) -> None:
        self.model, self.cfg, self.tasks = model, cfg, tasks or plain_tasks()
        self.phases = model.fusion.phases
        self.memory = model.fusion.prepare(targets.cpu(), groups, seed)
        if self.memory is not None:
            self.memory.to(targets.device)
        self.optimizer = build_optimizer(param_groups(model, nn.ModuleDict(), cfg.optim), cfg.optim)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.frozen = [frozen_in_phase(model, phase) for phase in self.phases]

    def step(
        self, model_input: ModelInput, rows: Tensor, target: Tensor, epoch: float, phase: int
    ) -> None:
        """Train on one batch; rows and target (1, B)."""
        output = forward(self.model, model_input)
        context = StepContext(
            rows=rows[0],
            epoch=epoch,
            phase=phase,
            criterion=self.tasks.criterion,
            row_weight=self.tasks.row_weight(target[0]),
            memory=self.memory,
        )
        self.model.fusion.loss(output, target[0], context).mean().backward()
        for parameter in self.frozen[phase]:
            parameter.grad = None
        if self.cfg.optim.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.cfg.optim.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set train or eval mode; encoders that a phase does not train stay in eval mode."""
        self.model.train(mode)
        self.model.encoders.train(mode and self.phases[phase].encoders)

    def logits(self, model_input: ModelInput) -> Tensor:
        """Return logits (1, B, K)."""
        return forward(self.model, model_input).logits[None]

    def begin_epoch(self, epoch: int, step: int) -> Mapping[str, int]:
        """Nothing to prepare."""
        return {}

    def weights(self, index: int) -> Weights:
        """Copy the weights."""
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}


class StackedTrainer:
    """Trains several copies of one fusion, each with its own weights and batches, as one.

    Parameters are stacked along a new first dimension and the forward pass is mapped over it
    (`torch.func.vmap`), so a step costs about as many kernel calls as that of a single copy. Adam
    works element by element and each copy is clipped by its own norm, so every copy learns what it
    would have learned alone, up to rounding.
    """

    def __init__(
        self, models: Sequence[FusionModel], cfg: BenchmarkConfig, tasks: Tasks | None = None
    ) -> None:
        self.cfg, self.tasks = cfg, tasks or plain_tasks()
        fusions = [model.fusion for model in models]
        self.stacked, self.buffers = stack_module_state(list(fusions))
        self.skeleton = copy.deepcopy(fusions[0]).to("meta")
        self.phases = fusions[0].phases
        name_of = {id(p): name for name, p in fusions[0].named_parameters()}
        groups = param_groups(models[0], nn.ModuleDict(), cfg.optim)
        for group in groups:
            group["params"] = [self.stacked[name_of[id(p)]] for p in group["params"]]
        self.optimizer = build_optimizer(groups, cfg.optim)

    def step(
        self, model_input: ModelInput, rows: Tensor, target: Tensor, epoch: float, phase: int
    ) -> None:
        """Train each copy on its batch; rows and target (S, B)."""
        logits = self.logits(model_input)
        loss = self.tasks.criterion(logits.flatten(0, 1), target.flatten(0, 1))
        loss.mean().mul(len(target)).backward()
        if self.cfg.optim.clip is not None:
            self._clip(self.cfg.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set train or eval mode."""
        self.skeleton.train(mode)

    def logits(self, model_input: ModelInput) -> Tensor:
        """Return logits (S, B, K)."""

        def logits_of_copy(parameters: Weights, buffers: Weights, copy_input: ModelInput) -> Tensor:
            output: FusionOutput = functional_call(
                self.skeleton, (parameters, buffers), (copy_input,)
            )
            return output.logits

        return vmap(logits_of_copy)(self.stacked, self.buffers, model_input)

    def begin_epoch(self, epoch: int, step: int) -> Mapping[str, int]:
        """Nothing to prepare."""
        return {}

    def weights(self, index: int) -> Weights:
        """Copy the weights of one seed, under the names of a FusionModel."""
        tensors = {**self.stacked, **self.buffers}
        return {f"fusion.{name}": x[index].detach().clone() for name, x in tensors.items()}

    def _clip(self, max_norm: float) -> None:
        grads = [p.grad for p in self.stacked.values() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
        factor = (max_norm / (norms + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(factor.reshape(-1, *[1] * (grad.ndim - 1)))


class Trainer(Protocol):
    """Trains one model, or several together: step by step, on what a feed gives."""

    cfg: BenchmarkConfig
    tasks: Tasks
    phases: tuple[Phase, ...]
    optimizer: torch.optim.Optimizer

    def begin_epoch(self, epoch: int, step: int) -> Mapping[str, int]:
        """Prepare an epoch after `step` steps; return modality -> epoch its schedule restarted."""

    def step(
        self, model_input: ModelInput, rows: Tensor, target: Tensor, epoch: float, phase: int
    ) -> None:
        """Train on one batch; rows and target (S, B)."""

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set train or eval mode."""

    def logits(self, model_input: ModelInput) -> Tensor:
        """Return logits (S, B, K)."""

    def weights(self, index: int) -> Weights:
        """Copy the weights of one seed, under the names of a FusionModel."""


def stackable(fusion: Fusion, features: Mapping[str, Features]) -> bool:
    """Whether copies trained together learn the same as copies trained alone.

    That needs a forward pass without randomness, no loss, memory or phases of the fusion's own, no
    buffers but running means, no recurrent cells (torch.func cannot map them), and pooled features
    only (where stacking is also faster).
    """
    if any(isinstance(part, nn.RNNCellBase | nn.RNNBase) for part in fusion.modules()):
        return False
    plain = type(fusion).loss is Fusion.loss and type(fusion).prepare is Fusion.prepare
    means = {b for m in fusion.modules() if isinstance(m, RunningMeans) for b in m.buffers()}
    if not plain or len(fusion.phases) > 1 or set(fusion.buffers()) - means:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        first, second = fusion.train()(features), fusion(features)
    return bool(torch.equal(first.logits, second.logits))
