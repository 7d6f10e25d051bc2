"""Parts of an extraction on disk, complete or absent, and one file of all of them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import locked, replacing, write_json
from fusionzoo.inputs.identity import changes

from .files import format_of

ABOUT, LOCK, SUFFIX = "about.json", "lock", ".arrow"
PATIENCE = 10.0  # seconds to wait for a killed process's lock, or for a shared folder to appear
WAITING = 2  # tables that may wait for the disk


class PartsFolder:
    """The folder `<out>.parts`: one Arrow file per part, renamed into place when complete."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.parts")

    @contextmanager
    def claimed(self, key: Mapping[str, str]) -> Iterator[PartsFolder]:
        """Lock the folder for a block; parts of another model, data or settings are an error."""
        self.folder.mkdir(parents=True, exist_ok=True)
        problem = f"another extraction is writing {self.out}"
        with locked(self.folder / LOCK, PATIENCE, problem, "take another --out"):
            self._check(key)
            write_json(self.folder / ABOUT, {**self._about(), "key": dict(key)})
            yield self
        if not (self.folder / ABOUT).is_file():
            # Once it is unlocked: Windows keeps open files.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self, key: Mapping[str, str]) -> None:
        differ, finished = changes(self._about().get("key", {}), key), self.finished()
        if differ and finished:
            raise FusionZooError(
                f"{self.folder} holds {len(finished)} parts of an extraction with other"
                f" {differ}: remove that folder, or take another --out"
            )
        if differ:
            self.remove()

    def _about(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / ABOUT).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def remove(self) -> None:
        """Remove all but the lock, with which the folder goes; last what says whose the parts are,
        for a kill in between."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == ABOUT):
            if path.stem != LOCK:
                path.unlink(missing_ok=True)

    def wait_until_visible(self) -> None:
        """Wait for the folder that process 0 made; network file systems are slow to show it."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / ABOUT).is_file():
            if time.monotonic() >= deadline:
                raise FusionZooError(
                    f"this process does not see {self.folder} of process 0: --out must be in a"
                    " folder that all nodes share"
                )
            time.sleep(0.1)

    @property
    def most_rows(self) -> int | None:
        """The rows that may be computed at once, as earlier processes noted; None: all."""
        noted = [self.folder / name for name in self._names("rows-")]
        return min((int(path.name.partition("-")[2]) for path in noted), default=None)

    def note_most_rows(self, rows: int) -> None:
        """Note for those that go on that more rows at once do not fit into memory."""
        (self.folder / f"rows-{rows}").touch()

    def finished(self) -> list[int]:
        """Return the parts that are complete, in order."""
        names = self._names("")
        return sorted(int(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX))

    def _names(self, prefix: str) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith(prefix)]

    def path(self, part: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"{part:08d}{SUFFIX}"

    def write(self, part: int, table: pa.Table) -> None:
        """Write a part; a kill at any moment leaves it complete or absent."""
        with (
            replacing(self.path(part)) as partial,
            pa.OSFile(str(partial), "wb") as file,
            pa.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(table.combine_chunks())

    def read(self, part: int) -> pa.Table:
        """Map a part into memory."""
        advice = "is damaged: remove it and start again"
        with explained(f"{self.path(part)} {advice}", OSError, pa.ArrowException):
            return pa.ipc.open_file(pa.memory_map(str(self.path(part)))).read_all()


class WritingThread:
    """Build and write tables in a thread of its own; at most `WAITING` of them wait."""

    def __init__(self, parts: PartsFolder) -> None:
        self.parts = parts
        self._pool = ThreadPoolExecutor(1, "write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> WritingThread:
        return self

    def add(self, part: int, build: Callable[[], pa.Table]) -> None:
        """Write the table that `build` returns, later; an error of an earlier one is raised."""
        self._pending.append(self._pool.submit(lambda: self.parts.write(part, build())))
        while len(self._pending) > WAITING:
            self._pending.popleft().result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        for future in self._pending if kind is None else ():
            future.result()


def merge(parts: PartsFolder, schema: pa.Schema, num_parts: int) -> None:
    """Write all parts, in order; each becomes a row group. The old file is replaced at the end."""
    missing = sorted({*range(num_parts)} - {*parts.finished()})
    if missing:
        raise FusionZooError(
            f"{len(missing)} of {num_parts} parts are missing, the first is {missing[0]}: the same"
            " command computes them"
        )
    tables = (parts.read(part) for part in range(num_parts))
    format_of(parts.out).write(tables, schema, parts.out)
    parts.remove()
