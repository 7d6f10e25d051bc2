"""Several tasks in one head: their logits are concatenated, and so are their labels.

Shapes: `B` rows, `N` rows of a split, `K` logits and `C` label columns of all tasks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fusionzoo.config import BenchmarkConfig, RunConfig, split_name
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError, check_known, check_number
from fusionzoo.evaluation.metrics import COMPARED_BY, Metric, compared_by, row_scores
from fusionzoo.targets import OneOf, Target

from .tasks import NO_TARGET, OBJECTIVES, Classification, Task

Metrics = Mapping[str, float]
TaskSettings = RunConfig | BenchmarkConfig  # both have `objective` and `targets`


class Tasks(nn.Module):
    """The tasks of a run: their combined loss and metrics.

    `plain` is one classification whose labels are indices, int64 (B,); otherwise labels are
    float32 (B, C), NaN where missing. A row's loss is the weighted sum over the tasks for which it
    has a label. Metrics of several tasks are named `column.metric`, and the loss chooses the best
    epoch; with one task its leading metric does, and the loss breaks ties. `metric` chooses in
    their place: a figure's name, of several tasks without a column that of the first. `flag` is the
    setting that it comes from, for errors.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Sequence[float] = (1.0,),
        plain: bool = False,
        metric: str = "",
        flag: str = "--train.metric",
    ) -> None:
        super().__init__()
        self.tasks, self.weights, self.plain = nn.ModuleList(tasks), list(weights), plain
        self.widths = [max(1, task.target.width) for task in tasks]  # no target: an idle logit
        self.columns = [task.target.columns for task in tasks]
        first = tasks[0]
        self.leading, self.higher = first.leading, first.higher
        self.shown = tuple(first.columns().items())
        if len(tasks) > 1:
            self.leading, self.higher = "loss", False
            self.shown = tuple(
                (f"{task.target.name}.{key}", f"{task.target.name}: {title}")
                for task in tasks
                for key, title in (dict(task.shown[:1]) | task.titled).items()
            )

        self._chosen, self._flag, self._slow_leads = "", flag, False
        if metric:
            self._lead_by(metric)

    def _lead_by(self, metric: str) -> None:
        known = {"loss": False} if self.has_target else {}  # name -> whether it is slow
        for task in self.tasks:
            assert isinstance(task, Task)
            prefix = "" if len(self.tasks) == 1 else f"{task.target.name}."
            names = dict.fromkeys([task.leading, *dict(task.shown)], False)
            names |= {entry.key: entry.slow for entry in task.entries}
            known |= {f"{prefix}{name}": slow for name, slow in names.items()}
        of_first = f"{self.first.target.name}.{metric}"
        name = of_first if metric not in known and of_first in known else metric
        check_known(name, known, f"{self._flag} {metric}: no figure has this name", "There are")
        self._chosen = name
        if name == "loss":  # chooses; what is shown stays
            return
        self.leading, self.higher, self._slow_leads = name, not self._is_error(name), known[name]
        self.shown = tuple(({name: name} | dict(self.shown)).items())

    def on_cpu(self) -> Tasks:
        """Return a copy for answers that lie on the CPU: weights of classes are tensors."""
        return copy.deepcopy(self).cpu()

    @property
    def has_target(self) -> bool:
        """Whether there is anything to predict."""
        return any(task.target.width for task in self.tasks if isinstance(task, Task))

    @property
    def positive(self) -> str:
        """The positive class of each target of two classes, `sick`; `column: sick` of several."""
        several, targets = len(self.tasks) > 1, [task.target for task in self.tasks]
        return ", ".join(
            f"{target.name}: {target.classes[1]}" if several else target.classes[1]
            for target in targets
            if isinstance(target, OneOf) and target.width == 2
        )

    @property
    def metric(self) -> Metric:
        """The figure that `scores` are of: the chosen one, or that of the only task; of several
        together their weighted loss."""
        usual = self.first.metric if len(self.tasks) == 1 else COMPARED_BY["several"]
        if self._chosen in ("", usual.name):
            return usual
        return compared_by(self._chosen, self.higher and self._chosen != "loss")

    def scores(self, logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return each row's score, the higher the better, whose mean by the weights (N,) is the
        figure up to its sign (`row_scores`): (N, K), labels of N -> (N,) float64. All are NaN where
        the figure is not defined."""
        if self.metric.name == "loss":
            return -self.criterion(logits, target).double()
        if self._chosen in ("", self.first.metric.name):
            return self.first.scores(logits, target)
        column, _, key = self.leading.rpartition(".")
        parts = [(self.first, logits, target)] if self.plain else self._parts(logits, target)
        task, answer, labels = next(x for x in parts if column in ("", x[0].target.name))
        has_slope = any(entry.key == key and entry.has_slope for entry in task.entries)

        def figure(answer: Tensor, labels: Tensor, *counts: Tensor) -> float | Tensor:
            known = ~labels.isnan().reshape(len(labels), -1).any(1)
            for x in counts:
                known = known & (x > 0)
            if not known.any():
                return math.nan
            return task.figure(key, *(x[known] for x in (answer, labels, *counts)))

        scores = row_scores(figure, (answer, labels), weights, has_slope)
        return scores if self.higher else -scores

    def costs(self, logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return what chooses epochs and settings of a benchmark and, to break ties, the loss, of
        each row, (2, N): minus the score of the chosen metric, else the loss too."""
        losses = self.criterion(logits, target)
        costs = -self.scores(logits, target, weights) if self._chosen else losses
        return torch.stack([costs, losses.to(costs)])

    def two_classes(self, logits: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return logits (N, 2) and class indices (N,), -1 where missing, of each target of two
        classes, by the prefix of its metrics: `diagnosis.` of several targets."""
        parts = self._parts(logits, labels.reshape(len(labels), -1))
        return {
            f"{task.target.name}." if len(parts) > 1 else "": (part, label[:, 0].nan_to_num(-1))
            for task, part, label in parts
            if isinstance(task.target, OneOf) and task.target.width == 2
        }

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
        for weight, (task, task_logits, label) in zip(
            self.weights, self._parts(logits, target), strict=True
        ):
            missing = label.isnan().any(-1)
            loss = task.criterion(task_logits, label.nan_to_num())
            total = total + weight * loss.masked_fill(missing, 0)
        return total

    def row_weight(self, target: Tensor) -> Tensor | None:
        """Return each row's weight in a plain run's `criterion`, (B,); None: all 1."""
        return self.first.row_weight(target) if self.plain else None

    def check_loss_of(self, fusion: str, ignores: Sequence[str]) -> None:
        """Raise on objective settings that the fusion's own loss ignores."""
        for name in ignores:
            if value := getattr(self.first, name, None):
                raise FusionZooError(
                    f"--objective.{name} {value:g}: {fusion} learns by a loss of its own, which has"
                    f" no place for {name}: leave it out, or choose another --fusion.name"
                )

    def metrics(
        self,
        logits: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        slow: bool = False,
    ) -> dict[str, float]:
        """Return the metrics of a split, each task's on the rows with its label: (N, K), labels.

        Rows count by their `weights`, (N,); those of weight 0 are left out. Slow metrics are left
        out unless `slow`, or one of them is the leading one.
        """
        slow = slow or self._slow_leads
        if weights is not None and not (counts := weights > 0).all():
            if not counts.any():
                raise FusionZooError("all weights of these samples are 0: nothing can be measured")
            logits, target, weights = (x[counts] for x in (logits, target, weights))
        if self.plain:
            return _measured(self.first, slow, logits, target, *_listed(weights))
        by_task: dict[str, dict[str, float]] = {}
        for task, task_logits, label in self._parts(logits, target):
            has_label = ~label.isnan().any(-1)
            if not has_label.any():
                raise FusionZooError(f"no sample of this split has a label {task.target.name!r}")
            rows = [x[has_label] for x in (task_logits, label, *_listed(weights))]
            by_task[task.target.name] = _measured(task, slow, *rows)
        if len(by_task) == 1:
            return next(iter(by_task.values()))
        losses = zip(self.weights, (x["loss"] for x in by_task.values()), strict=True)
        total = {"loss": sum(weight * loss for weight, loss in losses)}
        return total | {
            f"{name}.{key}": x for name, figures in by_task.items() for key, x in figures.items()
        }

    def check_weights(self) -> None:
        """Raise an error if a task or a metric cannot weigh rows."""
        for task in self.tasks:
            assert isinstance(task, Task)
            task.check_weights()

    def rank(self, figures: Metrics) -> tuple[float, float]:
        """Return a sort key, higher is better: the leading metric, then the negative loss; with
        the chosen metric `loss` that alone."""
        by_loss = _nan_last(-figures["loss"])
        return 0.0 if self._chosen == "loss" else self.leading_value(figures), by_loss

    def leading_value(self, figures: Metrics) -> float:
        """Return the leading metric, negated if lower is better."""
        leading = figures.get(self.leading, math.nan)
        return _nan_last(leading if self.higher else -leading)

    def check_leading(self, figures: Metrics) -> None:
        """Raise an error if the leading metric of a split is not defined, though the loss is."""
        if math.isnan(figures.get(self.leading, math.nan)) and math.isfinite(figures["loss"]):
            raise self.undefined("the validation split, and cannot choose an epoch")

    def undefined(self, where: str) -> FusionZooError:
        """Return the error of a leading metric that has no value somewhere."""
        return FusionZooError(
            f"{self._flag} {self.leading} is not defined on {where}: AUROC, for example, needs"
            " samples of two classes there"
        )

    def gain(self, name: str, figures: Metrics, reference: Metrics) -> str:
        """Format how much better one of the shown metrics is than that of another model."""
        gain = figures[name] - reference[name]
        if self.plain and name in dict(self.first.shown):  # shares
            return f"{100 * gain:+.1f} points"
        return f"{-gain if self._is_error(name) else gain:+.3f}"

    def _is_error(self, name: str) -> bool:
        """Whether less of a figure is better, `mae` or `age.mae`."""
        column, _, key = name.rpartition(".")
        tasks = [task for task in self.tasks if isinstance(task, Task)]
        return any(task.is_error(key) for task in tasks if column in ("", task.target.name))

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the prediction without any input, as exp(logits): labels of a split, how much each
        row counts (N,) -> (K,)."""
        if self.plain:
            return self.first.prior(labels, *_listed(weights)).to(torch.float32)
        priors = []
        for task, _, label in self._parts(labels.new_zeros(len(labels), sum(self.widths)), labels):
            known = ~label.isnan().any(-1)
            priors.append(task.prior(*(x[known] for x in (label, *_listed(weights)))))
        return torch.cat(priors)

    def unlabelled(self, labels: Tensor) -> list[str]:
        """Return the tasks for which no row has a label: labels of a split (N, C)."""
        if self.plain:
            return []
        parts = self._parts(labels.new_zeros(len(labels), sum(self.widths)), labels)
        return [
            task.target.name for task, _, task_labels in parts if task_labels.isnan().any(-1).all()
        ]

    def _parts(self, logits: Tensor, target: Tensor) -> list[tuple[Task, Tensor, Tensor]]:
        slices = logits.split(self.widths, dim=-1), target.split(self.columns, dim=-1)
        return list(zip(self.tasks, *slices, strict=True))  # type: ignore[arg-type]


def _measured(task: Task, slow: bool, *rows: Tensor) -> dict[str, float]:
    slow = slow and any(entry.slow for entry in task.entries)
    return task.metrics(*rows) | (task.figures(*rows, slow=True) if slow else {})


def _listed(weights: Tensor | None) -> tuple[Tensor, ...]:
    """Return the further argument of `Task.metrics`; objectives of plugins may not have it."""
    return () if weights is None else (weights,)


def _nan_last(x: float) -> float:
    return -math.inf if math.isnan(x) else x


def plain_tasks() -> Tasks:
    """Return a single classification task with cross-entropy."""
    return Tasks([Classification(OneOf("target"), torch.zeros(0))], plain=True)


def targets_of(cfg: TaskSettings) -> dict[str, str] | None:
    """Return {label column: kind of target} of a run; None: the class in column `target`."""
    name, _ = split_name(cfg.objective, "objective")
    kind = OBJECTIVES[name].target
    if not cfg.targets:
        return None if kind == "classification" else {} if kind == NO_TARGET else {"target": kind}
    if cfg.objective != {"name": "classification"}:
        raise FusionZooError(
            "--objective is about the one column `target`; with --targets, give each column its"
            f" own: --targets.{next(iter(cfg.targets))}.name {name}"
        )
    return {
        name: OBJECTIVES[split_name(component, f"targets.{name}")[0]].target
        for name, component in cfg.targets.items()
    }


def build_tasks(cfg: TaskSettings, train_set: PairedDataset) -> Tasks:
    """Build a run's tasks from its settings and the labels of the training split."""
    required, scheme = targets_of(cfg), train_set.scheme
    available = None if scheme is None else {target.name: target.kind for target in scheme}
    if required != available:
        raise FusionZooError(
            f"the data set reads the targets {available}, the objective needs {required}: leave"
            " --data.targets to train.py, which sets it by --objective or --targets"
        )
    return create_tasks(cfg, scheme, train_set.classes, train_set.targets)


def create_tasks(
    cfg: TaskSettings, scheme: Sequence[Target] | None, class_names: Sequence[str], labels: Tensor
) -> Tasks:
    """Create the tasks of these targets from the labels of the training split.

    `scheme` None is a single class of `class_names`, with labels (N,); else labels are (N, C).
    """
    if isinstance(cfg, RunConfig):
        create = partial(Tasks, metric=cfg.train.metric)
    else:
        create = partial(Tasks, metric=cfg.metric, flag="--metric")
    if scheme is None:
        name, settings = split_name(cfg.objective, "objective")
        classes = OneOf("target", tuple(class_names))
        task = OBJECTIVES.create(name, classes, labels, **settings)
        return create([task], plain=True)
    if not scheme:
        name, settings = split_name(cfg.objective, "objective")
        return create([OBJECTIVES.create(name, Target(""), labels, **settings)])
    tasks, weights = [], []
    parts = labels.split([target.columns for target in scheme], 1)
    for target, task_labels in zip(scheme, parts, strict=True):
        name, settings = split_name(cfg.targets.get(target.name, cfg.objective), "objective")
        if cfg.targets:
            weights.append(settings.pop("weight", 1.0))
            check_number(f"targets.{target.name}.weight", weights[-1], 0)
        labelled = task_labels[~task_labels.isnan().any(-1)]
        tasks.append(OBJECTIVES.create(name, target, labelled, **settings))
    return create(tasks, weights or [1.0])
