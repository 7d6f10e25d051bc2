"""Where the minutes of a benchmark go."""

from __future__ import annotations

import time


class Clock:
    """Seconds of wall time by part, in the order in which parts first end."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as this part's."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def laps(self) -> list[tuple[str, float]]:
        """Return (part, seconds) of each part."""
        return list(self._seconds.items())
