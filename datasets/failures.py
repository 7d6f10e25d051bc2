"""Values that cannot be used: counted over all loader processes, named in one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch

from fusionzoo.errors import FusionZooError, check_choice

OnError = Literal["raise", "missing", "skip"]
MAX_ERRORS = 0.05  # share of a modality's values that may fail
MIN_TRIED = 20  # values of a modality, before its share of failures can end a run


class Failures:
    """Flags per modality and row, in memory shared with the data loader's workers."""

    def __init__(self, num_rows: int, num_modalities: int) -> None:
        size = (num_modalities, num_rows)
        self._tried = torch.zeros(size, dtype=torch.bool).share_memory_()
        self._failed = torch.zeros(size, dtype=torch.bool).share_memory_()
        # Messages of the first failures in this process.
        self._reasons: dict[tuple[int, int], str] = {}

    def note_tried(self, row: int, column: int) -> None:
        """Count a value as tried; it counts once, however often it is read."""
        self._tried.numpy()[column, row] = True

    def note_failed(self, row: int, column: int, reason: str) -> None:
        """Count a value as tried and unusable."""
        self._tried.numpy()[column, row] = self._failed.numpy()[column, row] = True
        if len(self._reasons) < 5:
            self._reasons.setdefault((row, column), reason)

    def cells(self) -> list[tuple[int, int]]:
        """Return row and column of every failure so far."""
        # Of a copy: torch writes past its result where another process adds to what it has counted.
        return [(row, column) for row, column in self._failed.T.clone().nonzero().tolist()]

    def counts(self, column: int) -> tuple[int, int]:
        """Return how many values of a modality failed, and how many were tried."""
        failed, tried = (x.numpy()[column] for x in (self._failed, self._tried))
        return int(np.count_nonzero(failed)), int(np.count_nonzero(tried))

    def too_many(self, column: int, most: float, total: int) -> bool:
        """Return whether more than a share `most` of a modality's `total` values fail.

        While some values are untried, the limit is three standard deviations higher, so that an
        unlucky order does not end a run whose share is below `most`. With fewer than `MIN_TRIED`
        values, all have to fail.
        """
        failed, tried = self.counts(column)
        if tried < MIN_TRIED:
            return failed == tried == total and most < 1
        allowance = 3 * (most * (1 - most) * tried) ** 0.5 if tried < total else 0.0
        return failed > most * tried + allowance

    def error(
        self,
        column: int,
        name: str,
        most: float,
        *,
        source: str,
        sample_id: Callable[[int], str],
        decode: Callable[[int], object],
    ) -> FusionZooError:
        """Return the error of a modality with too many failures, which names the first five."""
        failed, tried = self.counts(column)
        rows = [row for row, other in self.cells() if other == column][:5]
        first = "; ".join(
            f"{sample_id(row)!r} ({name}): {self._reason(row, column, decode)}" for row in rows
        )
        return FusionZooError(
            f"{source}: {failed} of {tried} values of {name} tried so far cannot be used, more"
            f" than --data.max_errors {most:g} allows. The first: {first}"
        )

    def _reason(self, row: int, column: int, decode: Callable[[int], object]) -> str:
        """Return why a value failed; one that failed in another process is decoded again."""
        known = self._reasons.get((row, column))
        if known is not None:
            return known
        try:
            decode(row)
        except FusionZooError as error:
            return str(error)
        return "refused by its encoder"


def check_policy(on_error: str, max_errors: float) -> None:
    """Raise an error for an unknown `on_error` or a `max_errors` that is no share."""
    check_choice("on_error", on_error, get_args(OnError))
    if not 0 <= max_errors <= 1:
        raise FusionZooError(f"max_errors={max_errors}; it is a share, from 0 to 1")
