"""Logging (rank 0 only): progress bar, tables, metrics.jsonl, experiment loggers."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, Protocol, TextIO
from uuid import uuid4

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from fusionzoo.config.flags import in_seconds
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.files import whole_lines
from fusionzoo.ground.progress import progress_bar
from fusionzoo.ground.version import __version__
from fusionzoo.machine.devices import device_name
from fusionzoo.machine.distributed import World

from .checkpoint import State
from .multitask import Tasks
from .trainer import StepResult

PROJECT = "fusionzoo"
PACKAGES = ("torch", "torchvision", "transformers", "timm")


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


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def _key(folder: Path, logger: str, make: Any) -> str:
    """Return the id of this run in a logger, created once and kept in the run folder."""
    id_file = folder / f"{logger}.id"
    if not id_file.is_file():
        id_file.write_text(make())
    return id_file.read_text()


class Tracker:
    """Show a run's progress, append a line per event to metrics.jsonl, feed a logger.

    That of a trial has the clock of its run, `of`, and names the run's folder; a `quiet` one shows
    its progress bar alone.
    """

    def __init__(self, world: World, of: Tracker | None = None, *, quiet: bool = False) -> None:
        self.world = world
        self.folder: Path | None = of.folder if of else None
        self.quiet = quiet
        self.bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}  # beside the progress
        self.file: TextIO | None = None
        self.logger: Logger | None = None
        self.seconds: dict[str, float] = {}
        self._phase = ""
        self._since = time.perf_counter()
        self._created: float = of._created if of else time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, set-up included."""
        return time.monotonic() - self._created

    def seconds_left(self, time_limit: str | float | None) -> float:
        """Return the seconds until `--train.time_limit`."""
        limit = inf if time_limit is None else in_seconds(time_limit, "train.time_limit")
        return limit - self.elapsed

    def is_late(self, time_limit: str | float | None) -> bool:
        """Whether the run has taken longer than `--train.time_limit`."""
        return self.seconds_left(time_limit) <= 0

    @property
    def how_to_go_on(self) -> str:
        """Say how a run that stopped goes on."""
        return f"--resume --out {self.folder} goes on"

    def start(self, folder: Path, state: State, logger: str) -> None:
        """Open the files; a resumed run drops log lines newer than its checkpoint."""
        self.folder = self.folder or folder
        if not self.world.main:
            return
        path = folder / "metrics.jsonl"
        lines = whole_lines(path) if state.step else []
        events = [(line, json.loads(line)) for line in lines]
        path.write_text(
            "".join(
                line
                for line, event in events
                if event["step"] <= state.step and event.get("epoch", 0) <= state.evaluated
            )
        )
        self.file = path.open("a", buffering=1)
        self.logger = open_logger(logger, folder, state.step)

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """Show, in the block, a progress bar over the run's steps, of which `done` are behind."""
        self.lap("set up")
        quiet = not self.world.main
        with progress_bar(total=total, initial=done, unit="step", disable=quiet) as self.bar:
            try:
                yield
            finally:
                self.bar = None

    def advance(self) -> None:
        """Count a step."""
        if self.bar is not None:
            self.bar.update()

    def lap(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    @property
    def busy(self) -> float:
        """Seconds spent on steps; 0 where a run resumed after its last one, or an epoch's."""
        return self.seconds.get("data", 0.0) + self.seconds.get("train", 0.0)

    def log(self, step: int, event: str, figures: Mapping[str, Any]) -> None:
        """Record `figures` (numbers, nested by name) of one event."""
        if self.bar is not None and "loss" in figures:
            rates = {n: f"{x:.1e}" for n, x in figures.get("lr", {}).items() if "/" not in n}
            same = len(set(rates.values())) == 1
            rates = {"lr": next(iter(rates.values()))} if same else rates
            self._show({"loss": f"{figures['loss']:.3f}", **rates})
        if self.file is not None:
            self.file.write(json.dumps({"step": step, "event": event, **figures}) + "\n")
        self._send(step, dict(_flat(figures, event)))

    def _show(self, figures: Mapping[str, str]) -> None:
        """Show figures beside the progress, until others of their names come."""
        self._shown |= figures
        if self.bar is not None:
            text = ", ".join(f"{name} {value}" for name, value in self._shown.items())
            self.bar.set_postfix_str(text, refresh=False)

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Send metrics to the logger; a server that does not answer must not end a run."""
        if self.logger is None:
            return
        try:
            self.logger.scalars(step, figures)
        except Exception as error:
            problem = f"step {step} is in metrics.jsonl, and not in the logger"
            self.say(f"warning: {problem}: {one_line(error)}")

    def log_step(
        self, step: int, loss: float, rates: Mapping[str, float], result: StepResult
    ) -> None:
        """Record a step: its mean loss, the learning rates, gradient norms and loss terms."""
        norms, losses = (
            {name: x.item() for name, x in tensors.items()}
            for tensors in (result.grad_norms, result.losses)
        )
        figures = {"loss": loss, "lr": rates, "grad_norm": norms, "losses": losses}
        self.log(step, "step", figures)

    def log_epoch(
        self,
        state: State,
        train_loss: float,
        val: Mapping[str, Any],
        tasks: Tasks,
        *,
        shown: bool = True,
    ) -> None:
        """Record an epoch, and print a line with its leading metric if it is to be `shown`."""
        figures = {"epoch": state.evaluated, "train": {"loss": train_loss}, "val": val}
        leading = tasks.leading
        self.log(state.step, "epoch", figures)
        unimodal = [
            f"{m} {metrics[leading]:.3f}"
            for m, metrics in val.get("unimodal", {}).items()
            if leading in metrics
        ]
        has_leading = leading != "loss" and leading in val
        score = {f"val {leading}": f"{val[leading]:.3f}"} if leading in val else {}
        self._show({"epoch": str(state.evaluated), **score})
        if not shown:
            return
        self.say(
            f"epoch {state.evaluated:3d}  train loss {train_loss:.3f}"
            + (f"  val loss {val['loss']:.3f}" if val.get("loss") else "")  # 0: nothing to predict
            + (f"  val {leading} {val[leading]:.3f}" if has_leading else "")
            + (f"  ({', '.join(unimodal)})" if unimodal else "")
        )

    def phase(self, name: str) -> None:
        """Announce a new phase of the fusion's training, if it has several."""
        if name != self._phase:
            self._phase = name
            if name != "train":
                self.say(f"phase: {name}")

    def say(self, *lines: str) -> None:
        """Print lines above the progress bar."""
        if self.world.main and not self.quiet:
            for line in lines:
                tqdm.write(line)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; all columns but the first hold numbers."""
        if self.world.main and not self.quiet:
            table = Table()
            for number, name in enumerate(header):
                table.add_column(name, justify="right" if number else "left", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            # Wider than a narrow terminal rather than cut: a file has 80 columns.
            Console(width=max(Console().width, 120)).print(title, table, sep="\n")

    def close(self) -> None:
        """Flush and close everything."""
        for resource in (self.file, self.logger):
            if resource is not None:
                resource.close()
        self.file = self.logger = None


def environment(world: World) -> dict[str, Any]:
    """Describe software and hardware of a run."""
    return {
        "python": platform.python_version(),
        # Of a checkout that is not installed no package tells the version.
        "packages": {name: version(name) for name in PACKAGES} | {"fusionzoo": __version__},
        "machine": platform.machine(),
        "device": device_name(world.device),
        "processes": world.size,
        "threads": torch.get_num_threads(),
    }


def _flat(figures: Mapping[str, Any], prefix: str) -> list[tuple[str, float]]:
    pairs: list[tuple[str, float]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            pairs.append((f"{prefix}/{name}", value))
    return pairs
