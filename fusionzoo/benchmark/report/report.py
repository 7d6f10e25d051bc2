"""A finished benchmark as a Python object, which notebooks display."""

from __future__ import annotations

import json
import math
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError

from ..clock import read_laps
from .html import environment
from .writers import print_report, text_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Report:
    """The report of a benchmark; `Report.read(folder)` reads that of an earlier one."""

    folder: Path
    figures: Mapping[str, Any] = field(repr=False)  # the contents of summary.json

    @classmethod
    def read(cls, folder: str | Path) -> Report:
        """Read the report in a folder."""
        path = Path(folder) / "summary.json"
        if not path.is_file():
            raise FusionZooError(f"{folder} holds no finished report: {path} is not there")
        figures = json.loads(path.read_text(encoding="utf-8"))
        if "leaderboard" not in figures:
            raise FusionZooError(
                f"{folder} is a combination of reports; name the reports it was made of"
            )
        if "metric" not in figures:
            raise FusionZooError(
                f"{folder} was written by an earlier version: the same command runs it again"
            )
        figures["leaderboard"] = [
            {key: math.nan if value is None else value for key, value in line.items()}
            for line in figures["leaderboard"]
        ]
        return cls(Path(folder), figures)

    @property
    def verdict(self) -> str:
        """Whether fusion helped, and which fusion is best, in words."""
        return str(self.figures["verdict"])

    @property
    def leaderboard(self) -> pd.DataFrame:
        """The leaderboard as a pandas DataFrame: a row per strategy, the best first."""
        try:
            import pandas as pd
        except ImportError:
            raise FusionZooError(
                "the leaderboard is a pandas DataFrame: pip install pandas"
                " (Report.figures['leaderboard'] holds the same rows)"
            ) from None
        return pd.DataFrame(self.figures["leaderboard"])

    @property
    def failed(self) -> dict[str, str]:
        """The error of each strategy that failed."""
        return dict(self.figures["failed"])

    @property
    def page(self) -> Path:
        """The report as a web page."""
        return self.folder / "index.html"

    def open(self) -> None:
        """Show the web page in the browser."""
        webbrowser.open(self.page.resolve().as_uri())

    def print(self) -> None:
        """Print the leaderboard's main columns and the verdict."""
        print_report(self.figures, self.folder, read_laps(self.folder))

    def _repr_html_(self) -> str:
        header, rows = text_table(self.figures)
        template = environment().get_template("notebook.html")
        return str(
            template.render(figures=self.figures, header=header, rows=rows, page=str(self.page))
        )

    def _repr_markdown_(self) -> str:
        return (self.folder / "table.md").read_text(encoding="utf-8")
