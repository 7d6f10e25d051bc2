"""Train a fusion under training strategies (`--balance`): the steps are those of train.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fusionzoo.config import BenchmarkConfig, RunConfig, TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World
from fusionzoo.encoders import Encoder, Processor
from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features, StepContext
from fusionzoo.training.balance import StrategyInputs, build_balance
from fusionzoo.training.balance.base import presence
from fusionzoo.training.data import build_loader
from fusionzoo.training.objective import Objective
from fusionzoo.training.optim.optimizers import build_optimizer
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.tasks.multitask import Tasks
from fusionzoo.training.trainer import Trainer as FullTrainer
from fusionzoo.unimodal import UnimodalHeads

from .trainers import ModelInput, Weights, forward


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


class BalancedTrainer:
    """Trains one model under training strategies, by `training.trainer.Trainer`.

    `train` are the rows of the training split, whose numbers are the samples' ids. `dataset` is
    needed by strategies that train on loaders of their own (`gblend`), which probes do not have.
    """

    def __init__(
        self,
        model: FusionModel,
        cfg: BenchmarkConfig,
        tasks: Tasks,
        names: Sequence[str],
        targets: Tensor,
        train: Tensor,
        groups: Sequence[str] = (),
        seed: int = 0,
        dataset: Mapping[str, PairedDataset] | None = None,
    ) -> None:
        device = next(model.parameters()).device
        world = World(device=device)
        self.model, self.cfg, self.tasks = model, cfg, tasks
        self.phases = model.fusion.phases
        labels = targets[train]
        chosen = {name: cfg.balance_settings.get(name, {}) for name in names}
        heads = UnimodalHeads({}, model.fusion.dim, tasks.prior(labels.cpu()))
        ids = [str(row) for row in train.tolist()] if dataset is None else dataset["train"].ids
        objective = Objective(model, heads, tasks, ids, labels.cpu(), groups, seed)
        inputs = StrategyInputs(model, labels.cpu(), seed, world)
        objective.balance = build_balance(list(names), chosen, inputs)
        objective.to(device)
        if dataset is None:
            check_frozen(objective)
        run = RunConfig(
            optim=cfg.optim,
            train=TrainConfig(epochs=cfg.epochs, batch_size=cfg.batch_size, unimodal=False),
            balance=list(names),
            seed=seed,
        )
        self.optimizer = build_optimizer(
            param_groups(model, heads, cfg.optim, objective.balance), cfg.optim
        )
        self.trainer = FullTrainer(objective, self.optimizer, run, world)
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
        """Train on one batch; rows (of the training split) and target (1, B)."""
        batch = as_batch(model_input, self.train_rows[rows[0].cpu()], target[0])
        result = self.trainer.step([batch], StepContext(self.steps, epoch, phase))
        if result.skipped is not None:
            raise FusionZooError(f"{result.skipped}; a lower --optim.lr may help")
        self.steps += 1

    def train(self, mode: bool, phase: int = 0) -> None:
        """Set train or eval mode; in training the steps set it themselves."""
        self.trainer.module.train(mode)

    def logits(self, model_input: ModelInput) -> Tensor:
        """Return logits (1, B, K)."""
        return forward(self.model, model_input).logits[None]

    def weights(self, index: int) -> Weights:
        """Copy the weights."""
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}


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
