"""Read parts of shards, on this disk or behind a URL of fsspec, and the index of their folder."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, explained, one_line
from fusionzoo.structures import KINDS

T = TypeVar("T")
TRIES = 6
FIRST_WAIT = 0.2  # seconds; doubled after every failure
PATIENCE = 30.0  # seconds to wait for a connection, the first byte and each next one
PATIENCE_VARIABLE = "FUSIONZOO_PATIENCE"
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, FusionZooError)
# What file systems call the version of a file; the first of these that one tells is compared.
VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
_log = logging.getLogger("fusionzoo")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
NAME = "shards.json"
LISTED = "files.json"  # the files of a converted stream, which is opened like any Parquet
SAMPLES = "samples.arrow"
DIGESTS = "SHA256SUMS"
VERSION = 2
KNOWN_VERSIONS = (1, 2)  # the first has no checksums but digests of whole files
FORMATS = ("parquet", "webdataset")
STORED = ("image", "audio", "vector", "sequence")  # kinds whose values are in the shards alone
BYTES, OFFSETS = "_bytes", "_offsets"  # columns of samples.arrow: structs by modality
ITEMS = pa.list_(pa.int64())  # type of their fields of a modality with lists


def is_url(root: Any) -> bool:
    """Whether a root is a URL such as `s3://bucket/folder`.

    >>> is_url("s3://bucket/shards"), is_url("data/my.csv")
    (True, False)
    """
    return isinstance(root, str) and "://" in root


class Storage:
    """A folder whose files are read by name and range; each process makes its own connections."""

    def __init__(self, root: str | Path) -> None:
        self.url = root if isinstance(root, str) and is_url(root) else ""
        self.folder = None if self.url else Path(root).expanduser()
        self._connection: tuple[int, Any, str] | None = None
        self._versions: dict[str, tuple[Any, ...]] = {}  # size, and what else tells a version

    def __str__(self) -> str:
        return (self.url or str(self.folder)).rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def where(self, name: str) -> str:
        """Return the path or URL of a file."""
        return f"{self}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return a whole file, or None if there is none."""
        if self.folder is not None:
            path = self.folder / name
            return path.read_bytes() if path.is_file() else None
        try:
            return self._retry(name, lambda files, path: bytes(files.cat_file(path)))
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file from `start` until before `stop`, all of them."""
        if self.folder is not None:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
            if len(data) != stop - start:
                raise FusionZooError(f"{self.where(name)} is cut off: it ends before byte {stop:,}")
            return data

        def read(files: Any, path: str) -> bytes:
            data = bytes(files.cat_file(path, start=start, end=stop))
            if len(data) > stop - start:
                raise FusionZooError(f"{path}: the server sends whole files, not ranges")
            if len(data) < stop - start:
                raise OSError(f"{len(data):,} of {stop - start:,} bytes arrived")
            return data

        with explained(f"{self.where(name)} does not exist", FileNotFoundError):
            return self._retry(name, read)

    def size(self, name: str) -> int:
        """Return the bytes of a file, whose version must stay what it is now."""
        return int(self.pin(name)[0])

    def pin(self, name: str) -> tuple[Any, ...]:
        """Return a file's size and what else tells its version, as they were at the first call."""
        if name not in self._versions:
            self._versions[name] = self._version(name)
        return self._versions[name]

    def check_unchanged(self, name: str) -> None:
        """Raise an error if a file is no longer the version that was pinned."""
        pinned, now = self.pin(name), self._version(name)
        if now != pinned:
            change = f"{_words(pinned)} is now {_words(now)}"  # size and version
            problem = f"{self.where(name)} was replaced while it was read"
            raise FusionZooError(f"{problem}, {change}: start again, with new shards elsewhere")

    def _version(self, name: str) -> tuple[Any, ...]:
        if self.folder is not None:
            status = (self.folder / name).stat()
            return status.st_size, status.st_mtime_ns
        with explained(f"{self.where(name)} does not exist", FileNotFoundError):
            info = self._retry(name, _info)
        marks = (str(info[key]) for key in VERSIONS if info.get(key) is not None)
        return info["size"], next(marks, "")

    def names(self, suffix: str) -> list[str]:
        """Return the names of the folder's files that end so."""
        if self.folder is not None:
            return sorted(path.name for path in self.folder.glob(f"*{suffix}"))
        listed = self._retry("", lambda files, path: files.ls(path.rstrip("/"), detail=False))
        names = [str(path).rstrip("/").rpartition("/")[2] for path in listed]
        return sorted(name for name in names if name.endswith(suffix))

    def open(self, name: str, size: int) -> Any:
        """Return what Arrow reads a file from: a path, or a file object behind a URL."""
        return str(self.folder / name) if self.folder is not None else RangeFile(self, name, size)

    def _retry(self, name: str, read: Callable[[Any, str], T]) -> T:
        """Read from the URL's file system; wait and try again after an error of the network."""
        wait = FIRST_WAIT
        for attempt in range(TRIES):
            try:
                files, root = self._connect()
                return read(files, f"{root}/{name}" if name else root)
            except FINAL:
                raise
            except Exception as error:  # every library has errors of its own
                reason = one_line(error) or type(error).__name__
                if attempt == TRIES - 1:
                    problem = f"{self.where(name)} cannot be reached after {TRIES} attempts"
                    raise FusionZooError(f"{problem}: {reason}") from error
                _log.warning(
                    "%s: attempt %d of %d failed, another follows: %s",
                    *(self.where(name), attempt + 1, TRIES, reason),
                )
            time.sleep(wait)
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    def _connect(self) -> tuple[Any, str]:
        """Return this process's file system, and the folder's path in it."""
        if self._connection is None or self._connection[0] != os.getpid():
            scheme = self.url.partition("://")[0]
            extra = EXTRAS.get(scheme, "remote")
            advice = f"{scheme}: pip install 'fusionzoo[{extra}]'"
            with explained(advice, ImportError), explained(self.url, ValueError):
                import fsspec

                # An instance that another process made must not be used in this one.
                flags = {"skip_instance_cache": True, "use_listings_cache": False}
                files, root = fsspec.core.url_to_fs(self.url, **flags, **_timeouts(scheme))
            self._connection = (os.getpid(), files, root.rstrip("/"))
        return self._connection[1], self._connection[2]


def _timeouts(scheme: str) -> dict[str, Any]:
    """Return the settings that bound how long a server is waited for; fsspec's own come first."""
    with explained(f"{PATIENCE_VARIABLE} is no number of seconds", ValueError):
        patience = float(os.environ.get(PATIENCE_VARIABLE, PATIENCE))
    if not 0 < patience < math.inf:
        raise FusionZooError(f"{PATIENCE_VARIABLE} is {patience}; it must be seconds above 0")
    from fsspec.config import conf

    bounds: dict[str, Any]
    if scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, connect=patience, sock_read=patience)
        key, bounds = "client_kwargs", {"timeout": timeout}
    elif scheme in ("s3", "s3a"):
        key, bounds = "config_kwargs", {"connect_timeout": patience, "read_timeout": patience}
    else:
        return {}
    return {key: {**bounds, **conf.get(scheme, {}).get(key, {})}}


def _info(files: Any, path: str) -> dict[str, Any]:
    """Return what a file system says of a file; HTTP's says of any failure that there is none."""
    try:
        return dict(files.info(path))
    except FileNotFoundError as error:
        cause = error.__cause__
        if cause is None or getattr(cause, "status", 0) in (404, 410):
            raise
        raise OSError(one_line(cause) or type(cause).__name__) from cause


def _words(version: tuple[Any, ...]) -> str:
    """Return a version as a message has it."""
    return ", ".join(str(x) for x in version if x != "")


class RangeFile(io.RawIOBase):
    """A file behind a URL, of which only the ranges that are asked for are read."""

    def __init__(self, storage: Storage, name: str, size: int) -> None:
        self.storage, self.name, self.size, self.position = storage, name, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position, counted from the start, from here or from the end."""
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return how many there were."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, fewer at the end."""
        stop = self.size if size < 0 else min(self.size, self.position + size)
        start, self.position = self.position, max(stop, self.position)
        return self.storage.read_range(self.name, start, stop) if stop > start else b""


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard."""

    name: str
    size: int  # bytes
    blocks: Sequence[int]  # rows of each block
    # First byte, and that after the last: of each block of a tar, of the footer of a Parquet file.
    ranges: Sequence[Sequence[int]] = ()
    sha256: str = ""
    checksums: Sequence[int] = ()  # CRC-32 of each range: read often, and SHA-256 costs thrice


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """What `shards.json` holds."""

    format: str  # of FORMATS
    kinds: Mapping[str, str]  # of the modalities
    source: str  # a digest of the samples and settings that the shards were made from
    files: Sequence[ShardFile] = field(default_factory=tuple)
    samples_sha256: str = ""  # of samples.arrow

    def to_json(self) -> dict[str, Any]:
        """Return the contents of `shards.json`."""
        contents = {"version": VERSION, **asdict(self)}
        return {**contents, "sha256": _digest(contents)}


def read_index(storage: Storage, name: str = NAME) -> ShardIndex | None:
    """Read `shards.json`; None if there is none."""
    data = storage.read(name)
    if data is None:
        return None
    damages = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
    with explained(f"{storage.where(name)} cannot be read", *damages):
        contents = json.loads(data)
        recorded = contents.pop("sha256", "")
        digest, version = _digest(contents), contents.pop("version")
        if version not in KNOWN_VERSIONS:
            raise ValueError(f"its version is not {VERSION}: update fusionzoo")
        files = tuple(ShardFile(**entry) for entry in contents.pop("files"))
        index = ShardIndex(**contents, files=files)
        _check(index, needs_kinds=name == NAME)
        if (recorded or version > 1) and recorded != digest:
            raise ValueError("it was changed since it was written: copy it again")
        return index


def warn_of_missing_checksums(storage: Storage, index: ShardIndex) -> None:
    """Warn of shards that were written without checksums of what is read."""
    if not all(file.checksums for file in index.files):
        _log.warning(
            "%s was written by an earlier version, without checksums: whether its bytes were"
            " changed is not checked; `fusionzoo data convert` into another folder adds them",
            storage,
        )


def read_samples(storage: Storage, digest: str = "") -> pa.Table:
    """Read `samples.arrow`, mapped where possible, whose SHA-256 must be a known `digest`."""
    where = storage.where(SAMPLES)
    with explained(f"{where} cannot be read", pa.ArrowException, OSError, ValueError):
        if storage.folder is not None:
            source = pa.memory_map(str(storage.folder / SAMPLES)).read_buffer()
        else:
            data = storage.read(SAMPLES)
            if data is None:
                raise FusionZooError(f"{where} does not exist: copy the whole folder")
            source = pa.py_buffer(data)
        if digest and hashlib.sha256(source).hexdigest() != digest:
            raise FusionZooError(f"{where} was changed: copy it again, or convert again")
        table = pa.ipc.open_file(source).read_all()
        table.validate()
        return table


def stored_entries(table: pa.Table, column: str, name: str, num_rows: int) -> Any:
    """Return the entries of a struct of `samples.arrow` by row of the shards: numbers, int64 (N,),
    -1 without one, or an Arrow array of lists with a number of each item, null without one."""
    rows = table.column(name)
    places = rows.drop_null().to_numpy()
    entries = pc.struct_field(table.column(column), name).filter(rows.is_valid()).combine_chunks()
    is_whole = entries.type != ITEMS or not (entries.null_count or entries.flatten().null_count)
    if len(places) and not (is_whole and 0 <= places.min() <= places.max() < num_rows):
        raise FusionZooError(
            f"{SAMPLES}: {column} of {name} does not fit the shards: copy it again"
        )
    positions = np.full(num_rows, -1, np.int64)
    positions[places] = np.arange(len(places))
    by_row = entries.take(pa.array(positions, mask=positions < 0))
    return by_row if entries.type == ITEMS else pc.fill_null(by_row, -1).to_numpy()


def _check(index: ShardIndex, *, needs_kinds: bool) -> None:
    """Raise an error unless the index is of files in the folder, and says of which kinds."""
    if index.format not in FORMATS:
        raise ValueError(f"format {index.format!r} is none of {', '.join(FORMATS)}")
    if (needs_kinds and not index.kinds) or any(kind not in KINDS for kind in index.kinds.values()):
        raise ValueError(f"kinds {dict(index.kinds)!r}; known are {', '.join(KINDS)}")
    for file in index.files:
        if "/" in file.name or "\\" in file.name or file.name.startswith("."):
            raise ValueError(f"{file.name!r} is no file of the folder")
        sizes, count = (file.size, *file.blocks), len(file.ranges)
        has_all = index.format != "webdataset" or count == len(file.blocks)
        if not (
            all(isinstance(x, int) and x >= 0 for x in sizes)
            and all(len(x) == 2 and 0 <= x[0] <= x[1] <= file.size for x in file.ranges)
            and (has_all and len(file.checksums) in (0, count))
        ):
            raise ValueError(f"{file.name}: its sizes, ranges and checksums do not fit")


def _digest(contents: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the contents of `shards.json`, whatever its white space."""
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
