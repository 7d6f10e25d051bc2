"""The run folder: lock it, refuse to overwrite a run, and decide whether to resume."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from fusionzoo.config import RunConfig, write_yaml
from fusionzoo.distributed.process_group import World, from_main, gather
from fusionzoo.errors import FusionZooError
from fusionzoo.files import Process, lock, this_process

from .checkpoint_file import read_newest

LOCK = "lock"  # a file in the run folder, locked while a run writes there
PATIENCE = 30.0  # seconds to wait for another run's lock, or for a shared folder to appear
WRITTEN = (
    *("checkpoints", "model", "config.yaml", "metrics.json", "metrics.jsonl", "groups.json"),
    *("tensorboard", "wandb", "wandb.id", "mlruns", "mlflow.id", "trackio", "trackio.id"),
    "speed.json",
)


@contextmanager
def claim_folder(cfg: RunConfig, world: World) -> Iterator[tuple[Path, bool]]:
    """Lock the run folder until the block ends; also return whether to resume the run in it.

    The main process decides for all. A run is not overwritten unless asked for, and no two runs
    write into one folder at the same time.
    """
    claimed = problem = None
    processes = gather(this_process(), world)
    with ExitStack() as stack:
        if world.main:
            try:
                claimed = _claim(cfg, stack, processes)
            except (FusionZooError, OSError) as error:
                problem = str(error)
        claimed, problem = from_main((claimed, problem), world)
        if claimed is None:
            raise FusionZooError(problem)
        visible = gather(_appears(claimed[0] / LOCK), world)
        if not all(visible):
            raise FusionZooError(
                f"process {visible.index(False)} does not see {claimed[0]} of process 0: --out must"
                " be in a folder that all nodes share"
            )
        yield claimed


def _claim(cfg: RunConfig, stack: ExitStack, processes: Sequence[Process]) -> tuple[Path, bool]:
    if cfg.resume_anyway and not cfg.resume:
        raise FusionZooError("--resume_anyway goes on with a run: give --resume, too")
    folder = Path(cfg.out or f"runs/{cfg.data['name']}")
    if cfg.out is None:
        base, number = folder, 2
        while folder.exists():
            folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    folder.mkdir(parents=True, exist_ok=True)
    auto = cfg.resume == "auto"
    # A rank that lost the network exits after its own timeout; wait that long for the lock.
    _lock(folder, stack, min(PATIENCE, cfg.dist.timeout / 2) if auto else 0, processes)
    exists = (folder / "config.yaml").exists()
    if exists and not (cfg.resume or cfg.overwrite) and _has_step(folder):
        raise FusionZooError(
            f"{folder} holds a run: --resume continues it, --overwrite replaces it,"
            " another --out leaves it alone"
        )
    if exists and not cfg.resume:
        for name in WRITTEN:
            old = folder / name
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    resume = (folder / "checkpoints" / "last.pt").is_file() if auto else bool(cfg.resume)
    if not resume:
        store_config(cfg, folder)
    return folder, resume


def _has_step(folder: Path) -> bool:
    """Whether the folder's run made at least one step; otherwise it may be overwritten."""
    last = folder / "checkpoints" / "last.pt"
    if (folder / "metrics.json").exists() or (folder / "model").exists():
        return True
    if not last.parent.is_dir() or not any(last.parent.iterdir()):
        return False
    try:
        return bool(read_newest(last)[0]["state"]["step"])
    except FusionZooError:
        return True  # a damaged checkpoint may come from a long run


def store_config(cfg: RunConfig, folder: Path) -> None:
    """Write config.yaml; when resuming, only after the checkpoint was restored."""
    unset = replace(cfg, out=str(folder), resume=False, resume_anyway=False, overwrite=False)
    write_yaml(unset, folder / "config.yaml")


def _lock(folder: Path, stack: ExitStack, patience: float, processes: Sequence[Process]) -> None:
    """Lock a file in the folder until `stack` is closed, for these processes of a run."""
    file = stack.enter_context((folder / LOCK).open("a+"))
    problem = f"another run is writing into {folder}"
    lock(file, patience, problem, "take another --out", processes)


def _appears(path: Path) -> bool:
    """Wait for a file written by another process; network file systems are slow to show it."""
    deadline = time.monotonic() + PATIENCE
    while not path.is_file():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True
