"""The run folder: lock it, decide whether to resume, and its checkpoint files."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fusionzoo.config import RunConfig, write_yaml
from fusionzoo.datasets.opening.naming import folder_name
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import Process, locked, replacing, this_process
from fusionzoo.machine.distributed import World, gather, on_main

Contents = dict[str, Any]
MARK = b"sha256:"  # start of the archive's comment; 64 hexadecimal digits follow
COMMENT = len(MARK) + 64
BLOCK = 1 << 22  # bytes hashed at once
LOCK = "lock"  # a file in the run folder, locked while a run writes there
PATIENCE = 30.0  # seconds to wait for another run's lock, or for a shared folder to appear
REPEATED = ("trials", "seeds")  # settings of `train`, and folders of a run's several trainings
WRITTEN = (
    *("checkpoints", "model", "config.yaml", "metrics.json", "metrics.jsonl", "groups.json"),
    *("tensorboard", "wandb", "wandb.id", "mlruns", "mlflow.id"),
    *("trials", "trials.json", "seeds", "seeds.json", "check"),
)


def write(contents: Contents, path: Path, keep: int = 1, goes_on: str = "--resume") -> None:
    """Write a checkpoint atomically; the `keep - 1` previous files are kept, numbered. An error
    ends in what goes on after it."""
    try:
        with replacing(path) as partial:
            with partial.open("wb+") as file:
                torch.save(contents, file)
                _seal(file)
            _rotate(path, keep)
    except (OSError, RuntimeError) as error:
        previous = "the one before is kept" if path.is_file() else "there was none before"
        folder = next(folder for folder in path.parents if folder.is_dir())
        free = shutil.disk_usage(folder).free / 1e6  # torch does not say when a disk is full
        remedy = f"{folder} may not be written: ask for permission, or name another --out"
        remedy = "make room" if os.access(folder, os.W_OK) else remedy
        raise FusionZooError(
            f"cannot write {path} ({previous}; {free:,.1f} MB are free there): {error};"
            f" {remedy}, then {goes_on}"
        ) from error


def read_newest(path: Path) -> tuple[Contents, list[str]]:
    """Read `path`, or the newest undamaged older file; also return warnings about damaged ones."""
    problems: list[str] = []
    for candidate in (path, *_before(path)):
        if candidate == path or candidate.is_file():
            try:
                contents = read(candidate)
                if problems:
                    step = contents["state"]["step"]
                    problems = [f"warning: {problems[0]}; {candidate.name} is whole: step {step}"]
                return contents, problems
            except FusionZooError as error:
                problems.append(str(error))
    raise FusionZooError(problems[0])


def read(path: Path) -> Contents:
    """Read a checkpoint after verifying its digest: tensors and plain values only."""
    if not path.is_file():
        raise FusionZooError(f"no checkpoint {path} to resume from")
    with explained(f"{path} cannot be read"):
        with path.open("rb") as file:
            _verify(file)
        return torch.load(path, map_location="cpu", weights_only=True)


def _seal(file: BinaryIO) -> None:
    """Write the digest of the file's content into the archive's comment."""
    digest = _digest(file, file.tell())
    file.seek(-2, os.SEEK_END)  # the comment's length: 0 so far
    file.write(COMMENT.to_bytes(2, "little") + MARK + digest)


def _verify(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END) - COMMENT
    if size < 0:
        raise ValueError("it is cut off")
    file.seek(size)
    comment = file.read()
    if not comment.startswith(MARK):
        raise ValueError("it is cut off, or was not written by fusionzoo")
    if _digest(file, size) != comment.removeprefix(MARK):
        raise ValueError("its bytes have changed since it was written")


def _digest(file: BinaryIO, size: int) -> bytes:
    """Hash the first `size` bytes, the comment's length counted as 0."""
    file.seek(0)
    digest, remaining = hashlib.sha256(), size - 2
    while block := file.read(min(BLOCK, remaining)):
        digest.update(block)
        remaining -= len(block)
    return digest.hexdigest().encode()


def _before(path: Path) -> Iterator[Path]:
    """Yield the existing ones of last-1.pt, last-2.pt, ..., newest first."""
    numbered = [file.stem.rpartition("-")[2] for file in path.parent.glob(f"{path.stem}-*.pt")]
    for number in sorted(int(text) for text in numbered if text.isdigit()):
        yield path.with_stem(f"{path.stem}-{number}")


def _rotate(path: Path, keep: int) -> None:
    """Shift the numbers of previous files; by hard links, so that `path` never disappears."""
    for number in range(keep - 1, 0, -1):
        newer = path.with_stem(f"{path.stem}-{number - 1}") if number > 1 else path
        older = path.with_stem(f"{path.stem}-{number}")
        if newer.is_file():
            spare = older.with_suffix(".spare")
            spare.unlink(missing_ok=True)
            os.link(newer, spare)
            spare.replace(older)


@contextmanager
def claim_folder(cfg: RunConfig, world: World) -> Iterator[tuple[Path, bool]]:
    """Lock the run folder until the block ends; also return whether to resume the run in it.

    The main process decides for all. No run is overwritten, and no two write into one folder at
    the same time.
    """
    processes = gather(this_process(), world)
    with ExitStack() as stack:
        claimed = on_main(lambda: _claim(cfg, stack, processes), world)
        visible = gather(_appears(claimed[0] / LOCK), world)
        if not all(visible):
            raise FusionZooError(
                f"process {visible.index(False)} does not see {claimed[0]} of process 0: --out must"
                " be in a folder that all nodes share"
            )
        yield claimed


def _claim(cfg: RunConfig, stack: ExitStack, processes: Sequence[Process]) -> tuple[Path, bool]:
    folder = Path(cfg.out or f"runs/{folder_name(cfg.data)}")
    if cfg.out is None:
        base, number = folder, 2
        while folder.exists():
            folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    folder.mkdir(parents=True, exist_ok=True)
    auto = cfg.resume == "auto"
    # A rank that lost the network exits after its own timeout; wait that long for the lock.
    patience = min(PATIENCE, cfg.dist.timeout / 2) if auto else 0
    problem = f"another run is writing into {folder}"
    stack.enter_context(locked(folder / LOCK, patience, problem, "take another --out", processes))
    exists = (folder / "config.yaml").exists()
    if exists and not cfg.resume and _has_step(folder):
        raise FusionZooError(
            f"{folder} holds a run: --resume continues it; else remove it, or take another --out"
        )
    if exists and not cfg.resume:
        for name in WRITTEN:
            old = folder / name
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    several = [x for x in REPEATED if getattr(cfg.train, x) > 1]
    begun = ("checkpoints/last*.pt", *(f"{x}.json" for x in several))
    if cfg.resume is True and not exists:
        raise FusionZooError(f"{folder} holds no run to resume; --resume auto starts one")
    resume = bool(cfg.resume) and any(any(folder.glob(name)) for name in begun)
    if cfg.resume and exists and not resume:
        print(f"{folder} has no checkpoint yet: this run starts from the beginning")
    if not resume:
        store_config(cfg, folder)
    return folder, resume


def _has_step(folder: Path) -> bool:
    """Whether the folder's run made at least one step; otherwise it may be overwritten."""
    last = folder / "checkpoints" / "last.pt"
    if (folder / "metrics.json").exists() or (folder / "model").exists():
        return True
    if any(_has_step(training) for name in REPEATED for training in folder.glob(f"{name}/*")):
        return True
    if not last.parent.is_dir() or not any(last.parent.iterdir()):
        return False
    try:
        return bool(read_newest(last)[0]["state"]["step"])
    except FusionZooError:
        return True  # a damaged checkpoint may come from a long run


def store_config(cfg: RunConfig, folder: Path) -> None:
    """Write config.yaml; when resuming, only after the checkpoint was restored."""
    write_yaml(replace(cfg, out=str(folder), resume=False), folder / "config.yaml")


def _appears(path: Path) -> bool:
    """Wait for a file written by another process; network file systems are slow to show it."""
    deadline = time.monotonic() + PATIENCE
    while not path.is_file():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True
