"""The base class of objectives, and their registry.

An objective gives each row's loss, the metrics of a split, and which of them choose the best epoch.

Shapes: `B` rows, `N` rows of a split, `K` logits of a task, `C` numbers of its label.
"""

from __future__ import annotations

from torch import Tensor, nn

from fusionzoo.registry import Entry, Registry
from fusionzoo.targets import Target


class Task(nn.Module):
    """One target. `labels` (N, C) are those of the training split, without the missing ones.

    Buffers are not stored: they follow from settings and data.
    """

    leading: str  # the figure that chooses the best epoch
    higher = True  # whether more of it is better
    shown: tuple[tuple[str, str], ...]  # figures of the final table, and their titles

    def __init__(self, target: Target, labels: Tensor) -> None:
        super().__init__()
        self.target, self.labelled = target, len(labels)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each row's loss in single precision: (B, K), (B, C) -> (B,)."""
        raise NotImplementedError

    def row_weight(self, target: Tensor) -> Tensor | None:
        """Return how much each row counts in `criterion`, (B,); None: all the same."""
        return None

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        """Measure a whole split, on the CPU: (N, K), (N, C)."""
        raise NotImplementedError

    def prior(self, labels: Tensor) -> Tensor:
        """Return what to answer where nothing is known, exp(logits): (N, C) -> (K,)."""
        raise NotImplementedError


OBJECTIVES: Registry[Task, Entry[Task]] = Registry(
    "objective", "docs/objectives.md", Entry, ("objective",)
)


def as_index(target: Tensor) -> Tensor:
    """Return class indices (N,) as they are, or from their column (N, 1)."""
    return target if target.ndim == 1 else target[:, 0].long()
