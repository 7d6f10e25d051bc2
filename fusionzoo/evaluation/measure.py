"""Measure a model: its answers to a split, collected once, and all figures computed from them.

Shapes: `N` samples, `K` logits and `C` label columns of all targets, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Features, keep_only

from .retrieval import Relevance, any_pair

Metrics = dict[str, float]
Subset = frozenset[str]  # of the modalities; the others are taken to be absent
R = TypeVar("R")
WEIGHTED_BY = "weighted_by"  # key of a model's metrics: the column of the samples' weights, if any
THRESHOLDS = "thresholds"  # key of a model's metrics: the chosen ones, by label
POSITIVE = "positive"  # key of a model's metrics: the positive one of two classes


def weighted_by(column: str) -> str:
    """Say that figures are weighted, for titles."""
    return f"weighted by {column}"


def terms(metrics: Mapping[str, Any]) -> str:
    """Say for titles what weighs the samples, and which class is the positive one.

    >>> terms({"positive": "ill", "weighted_by": "share"})
    ', weighted by share, positive: ill'
    """
    words: dict[str, Callable[[Any], str]] = {
        WEIGHTED_BY: weighted_by,
        POSITIVE: "positive: {}".format,
        THRESHOLDS: lambda x: "answered from " + ", ".join(f"{k} {p:.3g}" for k, p in x.items()),
    }
    return "".join(f", {say(metrics[key])}" for key, say in words.items() if key in metrics)


class HasMetrics(Protocol):
    """What computes the metrics of a split (`training.multitask.Tasks`)."""

    def metrics(
        self, logits: Tensor, target: Tensor, weights: Tensor | None = None, *, slow: bool = False
    ) -> Metrics:
        """Return the metrics of samples: (N, K), labels, how much each counts (N,)."""

    def unlabelled(self, labels: Tensor) -> list[str]:
        """Return the targets for which no sample has a label."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a model answers to N labelled samples."""

    target: Tensor  # indices (N,), or numbers (N, C), NaN if missing
    present: dict[str, Tensor]  # modality -> bool (N,)
    fused: Tensor  # logits of the fusion, (N, K)
    alone: dict[str, Tensor] = field(default_factory=dict)  # modality -> those of its own head
    by_subset: dict[Subset, Tensor] = field(default_factory=dict)  # of the fusion, given these
    aligned: dict[str, Tensor] = field(default_factory=dict)  # modality -> common space, (N, D)
    relevance: Relevance = Relevance()  # which samples' vectors belong together
    calibrated: Tensor | None = None  # logits of the fusion divided by the temperatures, (N, K)
    ids: list[str] = field(default_factory=list)
    weights: Tensor | None = None  # (N,) how much each sample counts; None: all alike

    @classmethod
    def join(cls, parts: Sequence[Answers]) -> Answers:
        """Join the answers to batches, which have the same modalities and subsets."""
        names = [x.name for x in fields(cls)]
        return cls(**{name: _joined([getattr(x, name) for x in parts]) for name in names})

    def cpu(self) -> Answers:
        """Return the answers in main memory."""
        return Answers(**{x.name: _mapped(Tensor.cpu, getattr(self, x.name)) for x in fields(self)})

    def has_any(self, modalities: Collection[str]) -> Tensor:
        """Return which samples have one of these modalities, bool (N,)."""
        return torch.stack([self.present[name] for name in modalities]).any(0)

    def retrieval(self, figures_of: Callable[..., R]) -> R | None:
        """Return `retrieval_figures` or `retrieval_intervals` of the common space; None without
        one, or where no sample has two modalities."""
        if len(self.aligned) < 2:
            return None
        present = torch.stack([self.present[name] for name in self.aligned], dim=1)
        if not any_pair(present):
            return None
        return figures_of(self.aligned, present, **self.relevance._asdict())


def _joined(parts: Sequence[Any]) -> Any:
    """Join tensors by their rows, lists by their items, and what holds them by name."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([*parts])
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, Relevance):
        return Relevance(*map(_joined, zip(*parts, strict=True)))
    return [item for part in parts for item in part] if isinstance(first, list) else first


def _mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Relevance):
        return Relevance(*(_mapped(change, x) for x in tree))
    if isinstance(tree, dict):
        return {name: _mapped(change, x) for name, x in tree.items()}
    return tree


@torch.no_grad()
def logits_of(
    model: FusionModel, features: Mapping[str, Features], subsets: Collection[Subset] = ()
) -> tuple[Tensor, dict[str, Tensor], dict[Subset, Tensor]]:
    """Return logits (B, K): of the fusion, of each modality's own head, of the fusion given each
    of these subsets of the modalities."""
    alone = {} if model.heads is None else model.heads(features)
    by_subset = {names: model.fuse(keep_only(features, *names)).logits for names in subsets}
    return model.fuse(features).logits, alone, by_subset


class Figures(NamedTuple):
    """The metrics of a split."""

    fused: Metrics
    alone: dict[str, Metrics]  # of each modality's own head, unless no sample has the modality
    by_subset: dict[Subset, Metrics]  # of the fusion given these, among samples that have one


def measure(tasks: HasMetrics, answers: Answers, *, slow: bool = False) -> Figures:
    """Compute the metrics of the fusion, of the modalities' heads and of subsets."""
    target, weights = answers.target, answers.weights
    fused = tasks.metrics(answers.fused.float(), target, weights, slow=slow)
    alone = {
        name: tasks.metrics(logits.float(), target, weights, slow=slow)
        for name, logits in answers.alone.items()
        if answers.present[name].any()
    }
    by_subset = {}
    for names, logits in answers.by_subset.items():
        rows = answers.has_any(names)
        if measurable(tasks, answers, rows):
            chosen = None if weights is None else weights[rows]
            by_subset[names] = tasks.metrics(logits[rows].float(), target[rows], chosen, slow=slow)
    return Figures(fused, alone, by_subset)


def measurable(tasks: HasMetrics, answers: Answers, rows: Tensor) -> bool:
    """Whether each target has a label among these samples, bool (N,), that counts."""
    if answers.weights is not None:
        rows = rows & (answers.weights > 0)
    return bool(rows.any()) and not tasks.unlabelled(answers.target[rows])
