"""Experiment loggers: TensorBoard, Weights & Biases, MLflow, Trackio, or nowhere.

Each takes numbers by name, and goes on with the same run after a resume. Their own environment
variables say where they write (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`, `TRACKIO_DIR`);
without those, into the run folder, but for Weights & Biases' server.
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
    """Somewhere to log metrics to."""

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a step."""

    def close(self) -> None:
        """Write what is left."""


def open_logger(name: str, folder: Path, step: int) -> Logger | None:
    """Open the logger `name` for the run in `folder`, which goes on after `step`."""
    if name == "none":
        return None
    try:
        return LOGGERS[name](folder, step)
    except ImportError as error:
        raise FusionZooError(f"--log {name} needs pip install 'fusionzoo[{name}]'") from error
    except Exception as error:  # each logger has its own, for a login that is missing, say
        raise FusionZooError(f"--log {name}: {one_line(error)}; --log none goes without") from error


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What came after the checkpoint is hidden: it is written again.
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
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it would rather have a database
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
        self.client = MlflowClient(tracking_uri=where)
        self.run = _key(folder, "mlflow", lambda: self._create(folder.name))

    def _create(self, name: str) -> str:
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self.client.create_experiment(PROJECT)
        return str(self.client.create_run(experiment, run_name=name).info.run_id)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            allowed = re.sub(r"[^\w/.\- :]", "_", name)
            self.client.log_metric(self.run, allowed, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio:
    """Trackio, on this machine unless its own variables say otherwise."""

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
    kept = folder / f"{logger}.id"
    if not kept.is_file():
        kept.write_text(make())
    return kept.read_text()
