"""Train the models of one or several seeds on data in memory, with early stopping."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fusionzoo.config import BenchmarkConfig, RunConfig, TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import Encoder, Processor
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import row_mean
from fusionzoo.fusion import Fusion
from fusionzoo.fusion.base import RunningMeans
from fusionzoo.model.fusion_model import FusionModel, UnimodalHeads
from fusionzoo.structures import Batch, Features, FusionOutput, Phase, StepContext
from fusionzoo.training.balance import StrategyInputs, build_balance
from fusionzoo.training.balance.base import presence
from fusionzoo.training.build import check_weighable
from fusionzoo.training.freezing import frozen_in_phase
from fusionzoo.training.loaders import build_loader
from fusionzoo.training.multitask import Tasks, plain_tasks
from fusionzoo.training.objective import Objective
from fusionzoo.training.optim import build_optimizer, param_groups, set_rates
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer

from .executors import check_time

ModelInput = Mapping[str, Features] | Batch  # cached features, or a batch for the encoders
Weights = dict[str, Tensor]
AROUND = 1  # epochs before and after the best one over which validation losses are averaged


class Feed(Protocol):
    """Provides the model's input for the rows of each step."""

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[ModelInput]:
        """Yield the input for each chunk of rows, (B,) or (S, B); `epoch` -1 means evaluation."""


def forward(model: FusionModel, model_input: ModelInput) -> FusionOutput:
    """Run the fusion on cached features, or encoders and fusion on a batch."""
    return model(model_input) if isinstance(model_input, Batch) else model.fusion(model_input)


def over_mean(weights: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the training rows' weights over their mean, by which their losses are multiplied."""
    return None if weights is None else (weights / weights.double().mean()).float().to(device)


class FeedTrainer(ABC):
    """Trains one model, or several together: step by step, on what a feed gives."""

    cfg: BenchmarkConfig
    tasks: Tasks
    model: FusionModel
    phases: tuple[Phase, ...]
    optimizer: torch.optim.Optimizer

    def begin_epoch(self, epoch: int, step: int) -> Mapping[str, int]:
        """Prepare an epoch after `step` steps; return modality -> epoch its schedule restarted."""
        return {}

    @abstractmethod
    def step(
        self, model_input: ModelInput, rows: Tensor, target: Tensor, epoch: float, phase: int
    ) -> None:
        """Train on one batch; rows, of the training split, and target (S, B)."""

    @abstractmethod
    def train(self, mode: bool, phase: int = 0) -> None:
        """Set train or eval mode."""

    def logits(self, model_input: ModelInput) -> Tensor:
        """Return logits (S, B, K)."""
        return forward(self.model, model_input).logits[None]

    def weights(self, index: int) -> Weights:
        """Copy the weights of one seed, under the names of a FusionModel."""
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}


class SingleTrainer(FeedTrainer):
    """Trains one model without training strategies, on what a feed gives.

    Not `training.trainer.Trainer`, because that is slower where a step is small. On cached features
    of 400 samples (two whole modalities, one class each) it gave the same weights, bit for bit, for
    every fusion; but training took 1.34 to 1.48 times the CPU time for `lmf`, `late_mean`, `gmu`,
    `concat` and `film`, and the same for `mbt`, whose step is large (batches of 64, one thread).
    Besides the step it makes a batch with ids and presence, averages loss terms over present rows
    and processes, and saves buffers in case a step is not finite. With training strategies
    `BalancedTrainer` runs it, and a test compares the two.
    """

    def __init__(
        self,
        model: FusionModel,
        cfg: BenchmarkConfig,
        targets: Tensor,
        groups: Sequence[str] = (),
        seed: int = 0,
        tasks: Tasks | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.model, self.cfg, self.tasks = model, cfg, tasks or plain_tasks()
        self.factors = over_mean(weights, targets.device)
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
        output = forward(self.model, model_input)
        context = StepContext(
            rows=rows[0],
            epoch=epoch,
            phase=phase,
            criterion=self.tasks.criterion,
            row_weight=self.tasks.row_weight(target[0]),
            memory=self.memory,
        )
        loss = self.model.fusion.loss(output, target[0], context)
        if self.factors is not None:
            loss = self.factors[rows[0]] * loss
        loss.mean().backward()
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


class StackedTrainer(FeedTrainer):
    """Trains several copies of one fusion, each with its own weights and batches, as one.

    Parameters are stacked along a new first dimension and the forward pass is mapped over it
    (`torch.func.vmap`), so a step costs about as many kernel calls as that of a single copy. Adam
    works element by element and each copy is clipped by its own norm, so every copy learns what it
    would have learned alone, up to rounding.
    """

    def __init__(
        self,
        models: Sequence[FusionModel],
        cfg: BenchmarkConfig,
        tasks: Tasks | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.cfg, self.tasks = cfg, tasks or plain_tasks()
        self.factors = over_mean(weights, torch.device("cpu"))  # where copies are trained
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
        logits = self.logits(model_input)
        loss = self.tasks.criterion(logits.flatten(0, 1), target.flatten(0, 1))
        if self.factors is not None:
            loss = self.factors[rows].flatten() * loss
        loss.mean().mul(len(target)).backward()
        if self.cfg.optim.clip is not None:
            self._clip(self.cfg.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, mode: bool, phase: int = 0) -> None:
        self.skeleton.train(mode)

    def logits(self, model_input: ModelInput) -> Tensor:
        def logits_of_copy(parameters: Weights, buffers: Weights, inputs: ModelInput) -> Tensor:
            output: FusionOutput = functional_call(self.skeleton, (parameters, buffers), (inputs,))
            return output.logits

        return vmap(logits_of_copy)(self.stacked, self.buffers, model_input)

    def weights(self, index: int) -> Weights:
        tensors = {**self.stacked, **self.buffers}
        return {f"fusion.{name}": x[index].detach().clone() for name, x in tensors.items()}

    def _clip(self, max_norm: float) -> None:
        grads = [p.grad for p in self.stacked.values() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
        factor = (max_norm / (norms + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(factor.reshape(-1, *[1] * (grad.ndim - 1)))


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
    # With `linear_skip` the last layer starts at zero, and hides what is random before it.
    pairs = ((first.logits, second.logits), (first.embedding, second.embedding))
    return all(torch.equal(x, y) for x, y in pairs)


class FitResult(NamedTuple):
    """The result of training with one seed."""

    weights: Weights  # of the best epoch
    best_epoch: int
    epochs: int  # until the patience ran out
    loss: float  # of the best epoch, on the validation split
    # (N,) losses of the validation samples, averaged over the best epoch and those next to it:
    # settings are compared by them, since the least of many noisy losses is too low.
    # With `--metric` these are minus its scores.
    losses: Tensor


def fit(
    trainer: FeedTrainer,
    feed: Feed,
    targets: Tensor,
    train: Tensor,
    val: Tensor,
    seeds: Sequence[int],
    weights: Tensor | None = None,
) -> list[FitResult]:
    """Train until the patience of every seed has run out; each keeps its best epoch.

    `targets` are those of all rows; `train` and `val` are rows; `weights` say how much those of
    `val` count in what chooses, (N,). Every seed has its own order of samples. A fusion
    that trains in phases is validated in the last one only.
    """
    runs = [_Run(seed, trainer.cfg.epochs, trainer.cfg.patience, weights) for seed in seeds]
    for epoch, validated in _epochs(trainer, feed, targets, train, seeds):
        if not validated:
            continue
        costs = validate(trainer, feed, targets, val, len(seeds), weights)
        for index, run in enumerate(runs):
            if run.add(epoch + 1, costs[index]):
                run.weights = trainer.weights(index)
        if all(run.last <= epoch + 1 for run in runs):
            break
    return [run.result(trainer.tasks) for run in runs]


def refit(
    trainer: FeedTrainer,
    feed: Feed,
    targets: Tensor,
    rows: Tensor,
    seeds: Sequence[int],
    epochs: Sequence[int],
) -> list[Weights]:
    """Train each seed for its number of epochs, without validation; return its weights.

    The schedule of the learning rate is that of `fit`, cut off after these epochs.
    """
    weights: dict[int, Weights] = {}
    for epoch, _ in _epochs(trainer, feed, targets, rows, seeds):
        for index, last in enumerate(epochs):
            if last == epoch + 1:
                weights[index] = trainer.weights(index)
        if len(weights) == len(seeds):
            break
    trainer.train(False)
    return [weights[index] for index in range(len(seeds))]


def mean_costs(costs: Tensor, weights: Tensor | None) -> tuple[float, float]:
    """Return the means of what `Tasks.costs` returns, (2, N), each row counting by its weight: the
    least chooses. Rounding breaks no tie; a cost that is not defined is the worst."""
    cost, loss = (float(row_mean(x.double(), weights)) for x in costs)
    return math.inf if math.isnan(cost) else round(cost, 12), loss


class _Run:
    """The validation costs of one seed, epoch by epoch, and its best epoch."""

    def __init__(
        self, seed: int, epochs: int, patience: int | None, sample_weights: Tensor | None
    ) -> None:
        self.seed, self.last, self.patience = seed, epochs, patience
        self.sample_weights = sample_weights
        self.by_epoch: dict[int, Tensor] = {}  # epochs done -> (N,) costs
        self.best, self.cost, self.loss = 0, math.inf, math.inf
        self.weights: Weights = {}

    def add(self, epoch: int, costs: Tensor) -> bool:
        """Add an epoch's costs and losses (2, N); return whether it is the best so far."""
        if epoch > self.last:
            return False  # the others go on
        self.by_epoch[epoch] = costs[0]
        cost, loss = mean_costs(costs, self.sample_weights)
        if not self.best or (cost, loss) < (self.cost, self.loss):
            self.best, self.cost, self.loss = epoch, cost, loss
            return True
        if self.patience is not None and epoch - self.best >= self.patience:
            self.last = epoch
        return False

    def result(self, tasks: Tasks) -> FitResult:
        """Return the best epoch; an error if training diverged, or nothing chooses."""
        if not math.isfinite(self.loss):
            raise FusionZooError(
                f"seed {self.seed}: the validation loss is {self.loss}; a lower --optim.lr may help"
            )
        if math.isinf(self.cost):
            raise tasks.undefined(f"the {len(self.by_epoch[self.best]):,} validation samples")
        near = [x for epoch, x in self.by_epoch.items() if abs(epoch - self.best) <= AROUND]
        losses = torch.stack(near).mean(0)
        return FitResult(self.weights, self.best, max(self.by_epoch), self.loss, losses)


def _epochs(
    trainer: FeedTrainer, feed: Feed, targets: Tensor, train: Tensor, seeds: Sequence[int]
) -> Iterator[tuple[int, bool]]:
    """Train an epoch at a time; yield its number, from 0, and whether it was of the last phase."""
    cfg = trainer.cfg
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    steps = math.ceil(len(train) / cfg.batch_size)
    plan = phased(cfg.optim, trainer.phases, cfg.epochs * steps, steps)
    alone = not isinstance(trainer, StackedTrainer)
    for epoch in range(cfg.epochs):
        order = torch.stack([torch.randperm(len(train), generator=g) for g in generators])
        chunks = order.split(cfg.batch_size, dim=1)
        rows = [train[chunk[0] if alone else chunk] for chunk in chunks]
        restarts = trainer.begin_epoch(epoch, epoch * steps)
        current_phase = -1
        for number, model_input in enumerate(feed(rows, epoch)):
            check_time()
            phase, factors = plan(epoch * steps + number, restarts=restarts)
            if phase != current_phase:
                trainer.train(True, phase)
                current_phase = phase
            set_rates(trainer.optimizer, factors)
            target = targets[train[chunks[number]]]
            train_rows = chunks[number].to(target.device)
            trainer.step(model_input, train_rows, target, epoch + number / steps, phase)
        yield epoch, current_phase == len(trainer.phases) - 1


@torch.no_grad()
def validate(
    trainer: FeedTrainer,
    feed: Feed,
    targets: Tensor,
    val: Tensor,
    num_seeds: int,
    weights: Tensor | None = None,
) -> Tensor:
    """Return each seed's costs and losses on the validation split, (S, 2, N), see `Tasks.costs`;
    every row of it has a label, and counts by its weight (N,)."""
    trainer.train(False)
    chunks = val.split(512)
    alone = not isinstance(trainer, StackedTrainer)
    rows = [chunk if alone else chunk.expand(num_seeds, -1) for chunk in chunks]
    logits = torch.cat([trainer.logits(x).cpu() for x in feed(rows, -1)], 1)
    tasks, target = trainer.tasks.on_cpu(), targets[val].cpu()
    return torch.stack([tasks.costs(x, target, weights) for x in logits])


class CachedEncoder(Encoder):
    """Stands for a frozen encoder whose features are cached: it passes them on."""

    frozen = True

    def __init__(self, modality: str, kind: str, dim: int) -> None:
        super().__init__()
        self.modality, self.kind, self.dim = modality, kind, dim

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        """Return the features that are the inputs."""
        return Features(inputs["tokens"], inputs["mask"], inputs["pooled"])

    def processor(self, train: bool) -> Processor:
        raise FusionZooError(f"{self.modality}: features from the cache are not prepared")


class BalancedTrainer(FeedTrainer):
    """Trains one model under training strategies, by `training.trainer.Trainer`.

    `train` are the rows of the training split, whose numbers are the samples' ids; `inputs` has
    their targets, and `weights` (N,) is how much they count. `dataset` is needed by strategies that
    train on loaders of their own (`gblend`), which probes do not have.
    """

    def __init__(
        self,
        inputs: StrategyInputs,
        cfg: BenchmarkConfig,
        tasks: Tasks,
        names: Sequence[str],
        train: Tensor,
        groups: Sequence[str] = (),
        dataset: Mapping[str, PairedDataset] | None = None,
        weights: Tensor | None = None,
    ) -> None:
        model, labels, seed, world = inputs
        self.model, self.cfg, self.tasks = model, cfg, tasks
        self.phases = model.fusion.phases
        chosen = {name: cfg.balance_settings.get(name, {}) for name in names}
        heads = UnimodalHeads({}, model.fusion.dim, tasks.prior(labels, weights))
        ids = [str(row) for row in train.tolist()] if dataset is None else dataset["train"].ids
        mean_weight = None if weights is None else float(weights.double().mean())
        objective = Objective(model, heads, tasks, ids, labels, groups, seed, mean_weight)
        self.weights_of_rows = None if weights is None else weights.to(world.device)
        objective.balance = build_balance(list(names), chosen, inputs)
        objective.to(world.device)
        if dataset is None:
            check_frozen(objective)
        if weights is not None:
            check_weighable(objective)
        run = RunConfig(
            optim=cfg.optim,
            train=TrainConfig(epochs=cfg.epochs, batch_size=cfg.batch_size, unimodal=False),
            balance=list(names),
            seed=seed,
        )
        self.optimizer = build_optimizer(
            param_groups(model, heads, cfg.optim, objective.balance), cfg.optim
        )
        self.trainer = Trainer(objective, self.optimizer, run, world)
        self.loaders: dict[str, Any] = {}
        for name, split in (dataset or {}).items():
            collate = model.collate(train=name == "train")
            self.loaders[name] = build_loader(split, collate, run, world, name)
        self.steps, self.train_rows = 0, train

    def begin_epoch(self, epoch: int, step: int) -> Mapping[str, int]:
        """Let the strategies prepare an epoch."""
        self.steps = step
        self.trainer.begin_epoch(self.loaders, StepContext(step, float(epoch)))
        return self.trainer.restarts()

    def step(
        self, model_input: ModelInput, rows: Tensor, target: Tensor, epoch: float, phase: int
    ) -> None:
        batch = as_batch(model_input, self.train_rows[rows[0].cpu()], target[0])
        if self.weights_of_rows is not None:
            batch = batch._replace(weight=self.weights_of_rows[rows[0]])
        result = self.trainer.step([batch], StepContext(self.steps, epoch, phase))
        if result.skipped is not None:
            raise FusionZooError(f"{result.skipped}; a lower --optim.lr may help")
        self.steps += 1

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set train or eval mode; in training the steps set it themselves."""
        self.trainer.module.train(mode)


def as_batch(model_input: ModelInput, rows: Tensor, target: Tensor) -> Batch:
    """Return cached features as a batch that is encoded already; a batch with these labels."""
    if isinstance(model_input, Batch):
        return model_input._replace(target=target)
    ids = [str(row) for row in rows.tolist()]
    return Batch(ids, dict(model_input), presence(model_input), target)


def check_frozen(objective: Objective) -> None:
    """Raise on strategies that change encoders only, where all of them are frozen."""
    for name, strategy in objective.balance.items():
        if strategy.encoders_only:
            raise FusionZooError(
                f"--balance {name} changes how encoders learn, and here they are frozen:"
                " --mode finetune trains them"
            )
