"""A training run seen from Python: its metrics, history and model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import whole_lines
from fusionzoo.model import FusionModel, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Run:
    """What training left in a run folder; in a notebook it shows its table.

    `exit_code` is 0 for a finished run, 130 (Ctrl-C) or 75 (another signal) for one that was
    stopped: it has a history and a model with the weights of its last step, but no metrics.
    """

    folder: Path
    exit_code: int = 0
    stopped_model: FusionModel | None = None

    @cached_property
    def model(self) -> FusionModel:
        """The model of the best epoch, in evaluation mode, on the CPU."""
        return load(self.folder) if self.stopped_model is None else self.stopped_model.eval()

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What metrics.json holds: `train`, `val`, `test`, `unimodal`, ...; {} of a stopped run."""
        file = self.folder / "metrics.json"
        if self.exit_code or not file.is_file():
            return {}
        metrics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict for each epoch, as metrics.jsonl has them: `epoch`, `step`, `train`, `val`."""
        events = map(json.loads, whole_lines(self.folder / "metrics.jsonl"))
        return [event for event in events if event["event"] == "epoch"]

    def table(self) -> str:
        """Return the final table as Markdown: each modality alone, the fusion, the gain."""
        header, rows = self._table()
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def plot(self) -> Figure:
        """Draw the losses and the validation metric of every epoch (needs matplotlib)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise FusionZooError("run.plot() needs pip install 'fusionzoo[notebooks]'") from error
        history = self.history
        epochs = [event["epoch"] for event in history]
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        losses, metric = figure.subplots(1, 2)
        losses.plot(epochs, [event["train"]["loss"] for event in history], label="train")
        losses.plot(epochs, [event["val"]["loss"] for event in history], label="validation")
        losses.set(xlabel="epoch", ylabel="loss")
        losses.legend()
        name = self._leading_metric(history)
        metric.plot(epochs, [event["val"][name] for event in history], label="fusion")
        for modality in history[-1]["val"]["unimodal"] if history else ():
            values = [event["val"]["unimodal"][modality].get(name) for event in history]
            metric.plot(epochs, values, label=f"{modality} alone", linestyle="--")
        metric.set(xlabel="epoch", ylabel=f"validation {name}")
        metric.legend()
        return figure

    def _leading_metric(self, history: list[dict[str, Any]]) -> str:
        """Return the name of the metric that the run's table shows first, else the loss."""
        shown = self.metrics.get("table", {}).get("metrics", [])
        names = [*shown, *(history[-1]["val"] if history else ()), "loss"]
        return next(n for n in names if n != "loss" or n == names[-1])

    def _table(self) -> tuple[list[str], list[list[str]]]:
        if "table" not in self.metrics:
            raise FusionZooError(f"{self.folder} holds no results: the run was stopped")
        return self.metrics["table"]["header"], self.metrics["table"]["rows"]

    def _repr_html_(self) -> str:
        """Show the final table in a notebook."""
        if self.exit_code:
            return f"<p>stopped after {len(self.history)} epochs: {escape(str(self.folder))}</p>"
        header, rows = self._table()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
