"""Where the minutes of a benchmark go."""

from __future__ import annotations

import json
import time
from pathlib import Path

from fusionzoo.files import write_text

FILE = "minutes.json"


class Clock:
    """Seconds of wall time by part, in the order in which parts first end.

    With the folder of a report, the seconds of earlier runs of the same benchmark count too.
    """

    def __init__(self, out: Path | None = None) -> None:
        self._seconds = dict(read_laps(out)) if out else {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as this part's."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def laps(self) -> list[tuple[str, float]]:
        """Return (part, seconds) of each part."""
        return list(self._seconds.items())

    def save(self, out: Path) -> None:
        """Write the laps beside the report."""
        write_text(out / FILE, json.dumps(self._seconds, indent=1) + "\n")


def read_laps(out: Path) -> list[tuple[str, float]]:
    """Return the laps of a report's folder; none if it has none."""
    path = out / FILE
    return list(json.loads(path.read_text()).items()) if path.is_file() else []
