"""Open one hostile file in a process of its own, with limits on memory and time."""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fusionzoo
from fusionzoo.config import RunConfig, from_args
from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.summary import data_summary
from fusionzoo.encoders.audio import WaveProcessor
from fusionzoo.encoders.image import ImageProcessor, Preparation
from fusionzoo.encoders.text import BytesProcessor
from fusionzoo.errors import FusionZooError

BUDGET = 3 << 30  # bytes a process may take beyond what the parent holds
SECONDS = 150  # of wall-clock time; a drawing may take 10 s of CPU, on a busy machine too
SECRET = "the contents of a file outside of the root"
COLOUR, LEVEL = (1, 200, 3), 0.1234  # of a secret image and of a secret clip and vector
PROCESSORS = {
    "image": ImageProcessor(Preparation(size=(32, 32), resized=(35, 35))),
    "audio": WaveProcessor(16_000, 1.0),
    "text": BytesProcessor(64),
}


@dataclass(frozen=True)
class Outcome:
    """How one file ended: `ok`, `refused` by one line, or `fault`."""

    result: str
    message: str
    seconds: float
    megabytes: float  # beyond what the parent holds


def run(work: Callable[[], Any], root: Path, seconds: float) -> Outcome:
    """Run `work` in a forked process and return its outcome; files are allowed below `root`."""
    read_end, write_end = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            os.close(read_end)
            _child(work, root, write_end)
        finally:
            os._exit(1)  # out of memory even for its message: the parent's clean-up is not ours
    os.close(write_end)
    data, late = _receive(read_end, start + seconds)
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    took = time.monotonic() - start
    if late:
        return Outcome("fault", f"hang: more than {seconds:g} s", took, 0.0)
    if code or not data:
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Outcome("fault", f"crash: {name}", took, 0.0)
    result, message, baseline = pickle.loads(data)  # of our own child
    growth = max(0, usage.ru_maxrss * 1024 - baseline)
    if growth > BUDGET:
        result, message = "fault", f"memory: {growth >> 20:,} MB"
    return Outcome(result, message, took, growth / 2**20)


def _receive(read_end: int, deadline: float) -> tuple[bytes, bool]:
    """Return what the child writes until it closes the pipe, and whether it took too long."""
    data = b""
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return data, True
            chunk = pipe.read(1 << 16)
            if not chunk:
                return data, False
            data += chunk


def _child(work: Callable[[], Any], root: Path, write_end: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)  # C libraries print warnings
    warnings.simplefilter("ignore")
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + BUDGET, virtual + BUDGET))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = str(root)  # drawings are rendered in an empty folder
    outside = _watch_files(root)
    try:
        values = work()
        result, message = "ok", ""
        leaked = next((x for x in _flat(values) if _is_secret(x)), None)
        if leaked is not None:
            result, message = "fault", "read a file outside of the root"
    except FusionZooError as error:
        text = str(error)
        is_line = text and "\n" not in text and len(text) < 5000
        result, message = ("refused", text) if is_line else ("fault", f"not one line: {text!r}")
        if SECRET in text:
            result, message = "fault", f"shows a file outside of the root: {text}"
    except BaseException as error:  # a panic in Rust, too
        where = error.__traceback__
        while where and where.tb_next:
            where = where.tb_next
        place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else ""
        result, message = "fault", f"{type(error).__name__} at {place}: {str(error)[:200]}"
    if outside:
        result, message = "fault", f"opened outside of the root: {outside[0]}"
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump((result, message, baseline), pipe)
    os._exit(0)


def _watch_files(root: Path) -> list[str]:
    """Return a list that collects the files opened outside of `root` and of installed code."""
    paths = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, os.devnull}
    paths |= {str(root.resolve()), str(Path(fusionzoo.__file__).resolve().parents[1])}
    allowed = (*paths, *(str(Path(path).resolve()) for path in paths), "/proc", "/sys")
    outside: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(allowed):
                outside.append(path)

    sys.addaudithook(hook)
    return outside


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in _flat(child)]
    if isinstance(value, list | tuple):
        return [leaf for child in value for leaf in _flat(child)]
    return [value]


def _is_secret(value: Any) -> bool:
    """Whether a decoded value is that of a secret file."""
    if isinstance(value, str):
        return SECRET in value
    if not isinstance(value, torch.Tensor) or not value.numel():
        return False
    if value.dtype == torch.uint8 and value.ndim == 3:
        red, green, blue = (value[i] == level for i, level in enumerate(COLOUR))
        return bool((red & green & blue).any())
    return bool(value.is_floating_point() and (value - LEVEL).abs().max() < 1e-3)


# ---- what is done with a file


def open_table(path: Path, **settings: Any) -> Any:
    """Open a table as `--data.root` does; return its decoded samples, after a batch is made."""
    dataset = fusionzoo.create_dataset("manifest", root=str(path), **settings)
    return data_summary(dataset), _samples(dataset)


def _samples(dataset: PairedDataset) -> list[Any]:
    samples = [dataset[index] for index in range(min(len(dataset), 20))]
    kinds = dataset.modalities
    processors = {name: PROCESSORS[kind] for name, kind in kinds.items() if kind in PROCESSORS}
    if processors:
        Collate(processors)(samples)
    decoded = [dict(sample.values) for sample in samples if sample is not None]
    clips = [x.samples for row in decoded for x in row.values() if hasattr(x, "samples")]
    return [decoded, clips]


def open_media(kind: str, cell: str, root: Path) -> Any:
    """Open a manifest with one sample, whose cell refers to a file, and make a batch of it."""
    table = root / "data.jsonl"
    table.write_text(json.dumps({"id": "a", "split": "train", kind: cell}) + "\n")
    return open_table(table, paths=[kind] if kind == "text" else [])


def open_recipe(path: Path) -> Any:
    """Read a configuration file as `--config` does."""
    from_args(RunConfig, ["--config", str(path)])


def open_model(folder: Path) -> Any:
    """Load a model folder and let it answer."""
    model = fusionzoo.load(folder)
    model.embed([{"text": "a red cat", "vector": np.ones(3, np.float32)}])
