"""Experiment loggers: TensorBoard, Weights & Biases, MLflow, Trackio, or none.

Each takes numbers by name and continues the same run after a resume. They write where their
environment variables say (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`, `TRACKIO_DIR`); by default
into the run folder, except for Weights & Biases, which uses its server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from fusionzoo.errors import FusionZooError, one_line

PROJECT = "fusionzoo"


class Logger(Protocol):
    """A destination for metrics."""

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def close(self) -> None:
        """Flush and close."""


def open_logger(name: str, folder: Path, step: int) -> Logger | None:
    """Open the logger `name` for the run in `folder`, which continues after `step`."""
    if name == "none":
        return None
    try:
        return LOGGERS[name](folder, step)
    except ImportError as error:
        raise FusionZooError(f"--log {name} needs pip install 'fusionzoo[{name}]'") from error
    except Exception as error:  # each logger raises its own types, say for a missing login
        raise FusionZooError(f"--log {name}: {one_line(error)}; --log none goes without") from error


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides events newer than the checkpoint, which will be written again.
        purge = step + 1 if step else None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases."""

    def __init__(self, folder: Path, step: int) -> None:
        import wandb

        key = _key(folder, "wandb", lambda: uuid4().hex[:12])
        self.run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), id=key, resume="allow"
        )

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow."""

    def __init__(self, folder: Path, step: int) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants a database
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
        self.client = MlflowClient(tracking_uri=uri)
        self.run = _key(folder, "mlflow", lambda: self._create(folder.name))

    def _create(self, name: str) -> str:
        existing = self.client.get_experiment_by_name(PROJECT)
        experiment = existing.experiment_id if existing else self.client.create_experiment(PROJECT)
        return str(self.client.create_run(experiment, run_name=name).info.run_id)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            allowed = re.sub(r"[^\w/.\- :]", "_", name)
            self.client.log_metric(self.run, allowed, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio:
    """Trackio, on this machine unless its environment variables say otherwise."""

    def __init__(self, folder: Path, step: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").absolute()))
        import trackio

        self.trackio = trackio
        name = _key(folder, "trackio", lambda: folder.name)
        trackio.init(project=PROJECT, name=name, resume="allow", embed=False)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        self.trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self.trackio.finish()


LOGGERS: dict[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _key(folder: Path, logger: str, make: Any) -> str:
    """Return the id of this run in a logger, created once and kept in the run folder."""
    id_file = folder / f"{logger}.id"
    if not id_file.is_file():
        id_file.write_text(make())
    return id_file.read_text()
