"""The contract of objectives: a loss of each row alone, a prior, and metrics of a split."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.targets import Target, kind_of
from fusionzoo.training.tasks import NO_TARGET, OBJECTIVES, Task

from .checks import Checks, find

ROWS = 60
CHECKS: Checks[Subject] = Checks()
STEP = 1e-2  # of finite differences, in float32


@dataclass
class Subject:
    """An objective to be checked, and the kind of target that it learns."""

    cls: Callable[..., Task]
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **more: Any) -> Task:
        """Build the objective for labels of the training split."""
        return self.cls(self.target, self.labels, **{**self.settings, **more})

    def takes(self, setting: str) -> bool:
        """Whether the constructor has a setting."""
        return setting in inspect.signature(self.cls).parameters

    @cached_property
    def target(self) -> Target:
        """The target that it learns, from the example cells of its kind."""
        if not self.learns:
            return Target("")
        cls = kind_of(self.kind)
        return cls.learn("y", cls.examples)

    @property
    def learns(self) -> bool:
        """Whether it has a loss of its own: without a target only training strategies have."""
        return self.kind != NO_TARGET

    @cached_property
    def labels(self) -> Tensor:
        """Labels in which every class and level occurs: (N,) int64 of classes, else (N, C)."""
        if not self.learns:
            return torch.zeros(ROWS, 0)
        cells = itertools.islice(itertools.cycle(self.target.examples), ROWS)
        labels = torch.tensor([self.target.encode(cell) for cell in cells])
        return labels[:, 0].long() if self.kind == "classification" else labels.float()

    @cached_property
    def logits(self) -> Tensor:
        """Logits that have nothing to do with the labels, (N, K)."""
        draw = torch.Generator().manual_seed(1)
        return torch.randn(ROWS, max(1, self.target.width), generator=draw)


def gradient_of(task: Task, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss (N,) and the gradient of their sum (N, K)."""
    leaf = logits.clone().requires_grad_()
    loss = task.criterion(leaf, labels)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


def subject(target: str, settings: Mapping[str, Any] | None = None) -> Subject:
    """Return the objective of a name, `module:Class` or `file.py:Class`.

    It learns the kind of target that it, or the class that it derives from, is registered with;
    a class that is not registered learns one class of several.
    """
    cls = find(target, OBJECTIVES)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise FusionZooError(f"{target} is no subclass of {Task.__name__}, as an objective is")
    kinds = {OBJECTIVES[name].cls: OBJECTIVES[name].target for name in OBJECTIVES}
    known = [kinds[base] for base in inspect.getmro(cls) if base in kinds]
    return Subject(cls, known[0] if known else "classification", settings or {})


@CHECKS.add
def its_loss_has_one_value_for_each_row(subject: Subject) -> None:
    """Tried: 0, 1 and 12 rows of logits in float32 and bfloat16; values in single precision."""
    task = subject.build()
    for rows in (0, 1, 12):
        for dtype in (torch.float32, torch.bfloat16):
            loss = task.criterion(subject.logits[:rows].to(dtype), subject.labels[:rows])
            assert loss.shape == (rows,), f"{rows} rows have a loss of shape {tuple(loss.shape)}"
            assert loss.dtype == torch.float32, f"the loss of {dtype} logits is {loss.dtype}"
            assert loss.isfinite().all(), f"the loss of {dtype} logits is not finite"


@CHECKS.add
def labels_in_a_column_count_the_same(subject: Subject) -> None:
    """Tried: labels as several objectives beside each other get them, float (B, 1)."""
    if subject.labels.ndim == 1:
        columns = subject.labels[:, None].float()
        losses = subject.build().criterion(subject.logits, columns)
        expected = subject.build().criterion(subject.logits, subject.labels)
        assert torch.equal(losses, expected), "labels in a column have another loss"


@CHECKS.add
def a_rows_loss_does_not_depend_on_other_rows(subject: Subject) -> None:
    """Tried: each of twelve rows alone, all in reversed order, and the gradient of one row."""
    task, labels = subject.build(), subject.labels[:12]
    logits = subject.logits[:12].clone().requires_grad_()
    loss = task.criterion(logits, labels)
    for row in range(12):
        alone = task.criterion(logits[row : row + 1], labels[row : row + 1])[0]
        off = (alone - loss[row]).abs().item()
        assert off < 1e-5, f"the loss of row {row} alone differs by {off:.2g}"
    reversed_loss = task.criterion(logits.flip(0), labels.flip(0))
    assert torch.allclose(reversed_loss.flip(0), loss, atol=1e-5), "the order of rows matters"
    (gradient,) = torch.autograd.grad(loss[0], logits)
    assert not gradient[1:].any(), "the loss of row 0 has a gradient at other rows"


@CHECKS.add
def extreme_logits_give_finite_losses_and_gradients(subject: Subject) -> None:
    """Tried: logits of 1e4 and -1e4, of mixed and of one sign, in float32 and bfloat16."""
    ones = torch.ones_like(subject.logits)
    for name, sign in {"mixed": subject.logits.sign(), "large": ones, "small": -ones}.items():
        for dtype in (torch.float32, torch.bfloat16):
            logits = (1e4 * sign).to(dtype)
            loss, gradient = gradient_of(subject.build(), logits, subject.labels)
            where = f"of {name} logits of 1e4 is not finite in {dtype}"
            assert loss.isfinite().all(), f"the loss {where}"
            assert gradient.isfinite().all(), f"the gradient {where}"


@CHECKS.add
def its_gradient_is_the_derivative(subject: Subject) -> None:
    """Tried: finite differences of each row's loss along each logit."""
    task, labels, logits = subject.build(), subject.labels, subject.logits
    _, gradient = gradient_of(task, logits, labels)
    for k in range(logits.shape[1]):
        step = torch.zeros(logits.shape[1])
        step[k] = STEP
        up, down = (task.criterion(logits + sign * step, labels) for sign in (1, -1))
        slope = (up - down) / (2 * STEP)
        excess = (slope - gradient[:, k]).abs() - 0.01 * (1 + slope.abs())
        row = int(excess.argmax())
        assert excess[row] < 0, (
            f"row {row}, logit {k}: the gradient is {gradient[row, k]:.4g},"
            f" finite differences give {slope[row]:.4g}"
        )


@CHECKS.add
def its_prior_is_the_best_constant(subject: Subject) -> None:
    """Tried: log(prior) as the logits of every row, against 0.5 more and less of each logit."""
    task, labels = subject.build(), subject.labels
    prior = task.prior(labels)
    width = subject.logits.shape[1]
    assert prior.shape == (width,), f"the prior has shape {tuple(prior.shape)}, not ({width},)"
    constant = prior.log()
    assert constant.isfinite().all(), f"log(prior) is not finite: the prior is {prior.tolist()}"
    best = task.criterion(constant.expand(len(labels), -1), labels).mean().item()
    for k in range(width):
        for step in (-0.5, 0.5):
            other = constant.clone()
            other[k] += step
            loss = task.criterion(other.expand(len(labels), -1), labels).mean().item()
            assert loss >= best - 1e-4, (
                f"the constant log(prior) has a loss of {best:.4f},"
                f" with {step:+} at logit {k} it is {loss:.4f}"
            )


@CHECKS.add
def its_metrics_are_finite(subject: Subject) -> None:
    """Tried: a whole split and one row: `loss`, the leading metric and those that are shown."""
    task = subject.build()
    needed = {"loss", task.leading, *(name for name, _ in task.shown)}
    for rows in (len(subject.labels), 1):
        metrics = task.metrics(subject.logits[:rows], subject.labels[:rows])
        for name, value in metrics.items():
            assert isinstance(value, float), f"{name} of {rows} rows is a {type(value).__name__}"
            assert math.isfinite(value), f"{name} of {rows} rows is {value}"
        if subject.learns:  # else training adds the metrics of retrieval
            lacks = sorted(needed - metrics.keys())
            assert not lacks, f"metrics() lacks {lacks[0]!r}; it has {', '.join(metrics)}"


@CHECKS.add
def its_scores_average_to_its_metric(subject: Subject) -> None:
    """Tried: the mean of `scores`, by which a benchmark compares, against `metrics`."""
    if not subject.learns:
        return
    task, rows = subject.build(), (subject.logits, subject.labels)
    scores, metrics, metric = task.scores(*rows), task.metrics(*rows), task.metric
    assert scores.shape == (ROWS,), f"scores() of {ROWS} rows has shape {tuple(scores.shape)}"
    assert metric.name in metrics, f"metrics() lacks {metric.name!r}; it has {', '.join(metrics)}"
    mean, expected = metric.shown(scores.mean().item()), metrics[metric.name]
    assert math.isclose(mean, expected, rel_tol=1e-4, abs_tol=1e-6), (
        f"the scores average to a {metric.name} of {mean:.4f}; metrics() has {expected:.4f}"
    )
    is_error = task.is_error(metric.name)
    of_errors = f"{'one' if is_error else 'none'} of the `errors`, of which less is better"
    said = f"metric.higher is {metric.higher}, and {metric.name!r} is {of_errors}"
    assert is_error != metric.higher, said


@CHECKS.add
def a_lower_loss_means_a_better_leading_metric(subject: Subject) -> None:
    """Tried: descending the loss over free logits of each row; the leading metric improves."""
    if not subject.learns:
        return
    task, labels = subject.build(), subject.labels
    logits = subject.logits.clone().requires_grad_()
    before = task.metrics(logits.detach(), labels)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        task.criterion(logits, labels).mean().backward()
        optimizer.step()
    after = task.metrics(logits.detach(), labels)
    gain = after[task.leading] - before[task.leading]
    assert (gain if task.higher else -gain) > 0, (
        f"the loss falls from {before['loss']:.3f} to {after['loss']:.3f}, and {task.leading} goes"
        f" from {before[task.leading]:.3f} to {after[task.leading]:.3f}"
    )


@CHECKS.add
def weights_are_honoured(subject: Subject) -> None:
    """Tried: `row_weight`, with `class_weights` and `pos_weight` too where it has them."""
    plain = subject.build().criterion(subject.logits, subject.labels)
    weights = [float(k) for k in range(len(subject.target.classes))]
    settings: list[dict[str, object]] = [{}]
    if subject.takes("class_weights"):
        settings += [{"class_weights": "balanced"}, {"class_weights": weights}]
    for chosen in settings:
        task = subject.build(**chosen)
        weight = task.row_weight(subject.labels)
        loss = task.criterion(subject.logits, subject.labels)
        if weight is None:
            assert not chosen, f"with {chosen} row_weight() is None"
            continue
        assert weight.shape == loss.shape, f"row_weight() has shape {tuple(weight.shape)}"
        same = torch.allclose(loss, weight * plain, rtol=1e-4)
        assert same or not chosen, f"with {chosen} the loss is not row_weight() times the plain one"
        if chosen.get("class_weights") == weights:
            assert torch.equal(weight, subject.labels.float()), "row_weight() is not class_weights"
    if subject.takes("pos_weight"):
        task = subject.build(pos_weight="balanced")
        _, gradient = gradient_of(task, 0 * subject.logits, subject.labels)
        off = gradient.mean(0).abs().max().item()
        assert off < 0.01, f"balanced, and yet logits of 0 have a gradient of {off:.2g}"
