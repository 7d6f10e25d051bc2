"""Several tasks in one head: the logits of all stand side by side, and so do their labels.

Shapes: `B` rows, `N` rows of a split, `K` logits and `C` numbers of labels of all tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.config import RunConfig, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.targets import OneOf, Target

from .single import OBJECTIVES, Classification, Task, check

Metrics = Mapping[str, float]
ERRORS = ("mae", "rmse", "loss", "median_rank")  # figures of which less is better


class Tasks(nn.Module):
    """What a run learns.

    `plain` is one classification whose labels are indices, int64 (B,); else labels are float32
    (B, C), NaN where one is missing. A row's loss is the weighted sum over the tasks that it has a
    label of. Metrics of several tasks are called `column.figure`, and their loss chooses the best
    epoch; with one task it is the task's leading figure, and the loss where that is equal.
    """

    def __init__(
        self, tasks: Sequence[Task], weights: Sequence[float] = (1.0,), plain: bool = False
    ) -> None:
        super().__init__()
        self.tasks, self.weights, self.plain = nn.ModuleList(tasks), list(weights), plain
        self.widths = [max(1, one.target.width) for one in tasks]  # no target: an idle logit
        self.columns = [one.target.columns for one in tasks]
        first = tasks[0]
        self.leading, self.higher, self.shown = first.leading, first.higher, first.shown
        if len(tasks) > 1:
            self.leading, self.higher = "loss", False
            names = [(one.target.name, *one.shown[0]) for one in tasks]
            self.shown = tuple((f"{name}.{key}", f"{name}: {title}") for name, key, title in names)

    @property
    def first(self) -> Task:
        """The only task of a plain run."""
        task = self.tasks[0]
        assert isinstance(task, Task)
        return task

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each row's loss in single precision: (B, K), labels -> (B,)."""
        if self.plain:
            return self.first.criterion(logits, target)
        total = logits.new_zeros(len(logits), dtype=torch.float32)
        for weight, (task, own, label) in zip(
            self.weights, self._parts(logits, target), strict=True
        ):
            missing = label.isnan().any(-1)
            loss = task.criterion(own, label.nan_to_num())
            total = total + weight * loss.masked_fill(missing, 0)
        return total

    def row_weight(self, target: Tensor) -> Tensor | None:
        """Return how much each row counts in a plain run's `criterion`, (B,); None: all alike."""
        return self.first.row_weight(target) if self.plain else None

    def check_loss_of(self, fusion: str, ignores: Sequence[str]) -> None:
        """Refuse settings of the objective that the fusion's own loss cannot honour."""
        for name in ignores:
            if value := getattr(self.first, name, None):
                raise FusionZooError(
                    f"--objective.{name} {value:g}: {fusion} learns by a loss of its own, which has"
                    f" no place for {name}: leave it out, or choose another --fusion.name"
                )

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        """Measure a whole split, each task by the rows that have a label of it: (N, K), labels."""
        if self.plain:
            return self.first.metrics(logits, target)
        each: dict[str, dict[str, float]] = {}
        for task, own, label in self._parts(logits, target):
            there = ~label.isnan().any(-1)
            if not there.any():
                raise FusionZooError(f"no sample of this split has a label {task.target.name!r}")
            each[task.target.name] = task.metrics(own[there], label[there])
        if len(each) == 1:
            return next(iter(each.values()))
        losses = zip(self.weights, (own["loss"] for own in each.values()), strict=True)
        total = {"loss": sum(weight * loss for weight, loss in losses)}
        return total | {f"{name}.{key}": x for name, own in each.items() for key, x in own.items()}

    def rank(self, figures: Metrics) -> tuple[float, float]:
        """Say how good figures are, the greater, the better: the leading one first, then loss."""
        return self.leading_value(figures), _nan_last(-figures["loss"])

    def leading_value(self, figures: Metrics) -> float:
        """Return the leading figure, so that more of it is better."""
        leading = figures.get(self.leading, 0.0)
        return _nan_last(leading if self.higher else -leading)

    def gain(self, name: str, figures: Metrics, other: Metrics) -> str:
        """Say how much better one of the shown figures is than that of another model."""
        gain = figures[name] - other[name]
        if self.plain:
            return f"{100 * gain:+.1f} points"
        return f"{-gain if name.rpartition('.')[2] in ERRORS else gain:+.3f}"

    def prior(self, labels: Tensor) -> Tensor:
        """Return what to answer where nothing is known, exp(logits): the split's labels -> (K,)."""
        if self.plain:
            return self.first.prior(labels)
        parts = self._parts(labels.new_zeros(len(labels), sum(self.widths)), labels)
        return torch.cat([task.prior(own[~own.isnan().any(-1)]) for task, _, own in parts])

    def unlabelled(self, labels: Tensor) -> list[str]:
        """Name the tasks of which no row has a label: the labels of a split (N, C)."""
        if self.plain:
            return []
        parts = self._parts(labels.new_zeros(len(labels), sum(self.widths)), labels)
        return [task.target.name for task, _, own in parts if own.isnan().any(-1).all()]

    def _parts(self, logits: Tensor, target: Tensor) -> list[tuple[Task, Tensor, Tensor]]:
        slices = logits.split(self.widths, dim=-1), target.split(self.columns, dim=-1)
        return list(zip(self.tasks, *slices, strict=True))  # type: ignore[arg-type]


def _nan_last(x: float) -> float:
    return -math.inf if math.isnan(x) else x


def plain_tasks() -> Tasks:
    """Return the cross-entropy of one class."""
    return Tasks([Classification(OneOf("target"), torch.zeros(0))], plain=True)


def targets_of(cfg: RunConfig) -> dict[str, str] | None:
    """Return what columns of labels the run reads, and what they hold.

    None: the class in column `target`, as every data set has it.
    """
    name, _ = split_name(cfg.objective, "objective")
    kind = OBJECTIVES[name].name
    if not cfg.targets:
        return None if kind == "classification" else {} if kind == "none" else {"target": kind}
    if cfg.objective != {"name": "classification"}:
        raise FusionZooError(
            "--objective is about the one column `target`; with --targets, give each column its"
            f" own: --targets.{next(iter(cfg.targets))}.name {name}"
        )
    return {name: split_name(one, f"targets.{name}")[0] for name, one in cfg.targets.items()}


def build_tasks(cfg: RunConfig, train_set: PairedDataset) -> Tasks:
    """Build what the run learns from its settings and the labels of the training split."""
    wanted, scheme, labels = targets_of(cfg), train_set.scheme, train_set.targets
    found = None if scheme is None else {one.name: one.kind for one in scheme}
    if wanted != found:
        raise FusionZooError(
            f"the data set reads the targets {found}, the objective needs {wanted}: leave"
            " --data.targets to train.py, which sets it by --objective or --targets"
        )
    if scheme is None:
        name, settings = split_name(cfg.objective, "objective")
        one = OneOf("target", tuple(train_set.classes))
        return Tasks([OBJECTIVES.create(name, one, labels, **settings)], plain=True)
    if not scheme:
        name, settings = split_name(cfg.objective, "objective")
        return Tasks([OBJECTIVES.create(name, Target(""), labels, **settings)])
    tasks, weights = [], []
    for target, own in zip(scheme, labels.split([one.columns for one in scheme], 1), strict=True):
        name, settings = split_name(cfg.targets.get(target.name, cfg.objective), "objective")
        if cfg.targets:
            weights.append(settings.pop("weight", 1.0))
            check(f"targets.{target.name}.weight", weights[-1], 0)
        known = own[~own.isnan().any(-1)]
        tasks.append(OBJECTIVES.create(name, target, known, **settings))
    return Tasks(tasks, weights or [1.0])
