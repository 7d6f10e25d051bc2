"""Shards behind URLs: memory://, and an HTTP server that drops connections."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo.datasets.shards import storage
from fusionzoo.datasets.shards.blocks import StoredCells
from fusionzoo.datasets.shards.storage import Storage
from fusionzoo.errors import FusionZooError
from helpers.samples import described, epoch

ROWS = 200
SMALL = {"shard_mb": 1, "block_mb": 0.0005}


class Server(ThreadingHTTPServer):
    """Serves a folder with ranges; every `drop`-th answer is cut or never sent.

    `tags` are sent as ETag, by the end of the path.
    """

    tags: dict[str, str] = {}  # noqa: RUF012
    pause = 0.0  # seconds between four parts of an answer

    daemon_threads = True
    requests = dropped = 0
    drop = 0
    has_ranges = True
    lock = threading.Lock()


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def end_headers(self) -> None:
        for name, tag in self.server.tags.items():
            if self.path.endswith(name):
                self.send_header("ETag", tag)
        super().end_headers()

    def do_GET(self) -> None:
        server = self.server
        with server.lock:
            server.requests += 1
            fails = bool(server.drop) and server.requests % server.drop == 0
            server.dropped += fails
            cuts = fails and server.dropped % 2 == 0
        if fails and not cuts:
            self.close_connection = True
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        chosen = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if chosen and server.has_ranges:
            start, stop = int(chosen[1]), int(chosen[2] or len(data) - 1) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            data = data[start:stop]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        data = data[: len(data) // 2] if cuts else data
        if server.pause:
            for start in range(0, len(data), part := -(-len(data) // 5)):
                self.wfile.write(data[start : start + part])
                time.sleep(server.pause)
        else:
            self.wfile.write(data)
        self.close_connection = cuts


def rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {
            "id": f"r{n}",
            "image": draw.integers(0, 255, (6, 6, 3), dtype=np.uint8) if n % 5 else None,
            "vector": draw.standard_normal(4).astype(np.float32),
            "text": f"word {n}",
            "split": "train" if n % 4 else ("test", "val")[n // 4 % 2],
            "target": "ab"[n % 2],
        }
        for n in range(ROWS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("served")
    for format in ("parquet", "webdataset"):
        fz.convert(rows(), top / format, format=format, **SMALL)
    return top


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.001)


def url_of(server: Server, name: str) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{name}"


@pytest.mark.parametrize(("format", "workers"), [("parquet", 2), ("webdataset", 0)])
def test_no_sample_is_lost_or_doubled_if_one_connection_in_ten_is_dropped(
    format: str, workers: int, server: Server, folder: Path
) -> None:
    local = epoch(fz.create_dataset(folder / format).split("train"), 0)
    server.drop = 10
    remote = fz.create_dataset(url_of(server, format)).split("train")
    loaded = epoch(remote, workers)
    assert server.dropped >= 5
    assert len({*loaded}) == len(loaded) == 150
    assert local == loaded


def test_opening_reads_the_index_alone(server: Server) -> None:
    dataset = fz.create_dataset(url_of(server, "parquet"))
    _ = dataset.lengths(), dataset.targets, dataset.present
    assert (len(dataset), server.requests) == (ROWS, 2)  # shards.json, samples.arrow


@pytest.mark.slow
def test_training_reads_shards_over_http(server: Server, tmp_path: Path) -> None:
    server.drop = 10
    run = fz.train(
        {"name": "manifest", "root": url_of(server, "parquet"), "modalities": "vector"},
        fusion="concat",
        train={"epochs": 1, "batch_size": 32},
        out=str(tmp_path / "run"),
    )
    assert run.metrics["test"]["accuracy"] >= 0


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_shards_in_memory_are_those_on_disk(format: str, folder: Path) -> None:
    files = fsspec.filesystem("memory")
    files.put(str(folder / format), f"/shards-{format}", recursive=True)
    dataset = fz.create_dataset(f"memory://shards-{format}")
    local = fz.create_dataset(folder / format)
    assert epoch(local, 0) == epoch(dataset, 0)
    if format == "parquet":
        assert epoch(local, 0) == epoch(dataset, 1)
    files.rm(f"/shards-{format}", recursive=True)


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_files_without_an_index_are_listed_where_that_is_possible(
    format: str, folder: Path
) -> None:
    files = fsspec.filesystem("memory")
    for file in (folder / format).iterdir():
        if file.suffix in (".parquet", ".tar"):
            files.put(str(file), f"/plain-{format}/{file.name}")
    local = fz.create_dataset(folder / format)
    remote = fz.create_dataset(f"memory://plain-{format}")
    position = {key: row for row, key in enumerate(remote.ids)}
    order = [position[key] for key in local.ids]
    rows = zip(range(ROWS), order, strict=True)
    assert all(described(local[x]) == described(remote[y]) for x, y in rows)
    files.rm(f"/plain-{format}", recursive=True)


def test_a_cell_behind_a_url_names_no_file_of_this_machine(tmp_path: Path) -> None:
    media = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = pa.array([{"bytes": None, "path": "/etc/passwd"}], media)
    pq.write_table(pa.table({"image": cells, "split": ["train"]}), tmp_path / "a.parquet")
    fsspec.filesystem("memory").put(str(tmp_path / "a.parquet"), "/hostile/a.parquet")
    with pytest.raises(FusionZooError, match="which are not in the shards"):
        fz.create_dataset("memory://hostile")


def test_a_url_that_cannot_be_reached_is_one_line() -> None:
    with pytest.raises(FusionZooError, match="cannot be reached after 6 attempts") as error:
        fz.create_dataset("http://127.0.0.1:9/shards")
    assert "\n" not in str(error.value) and "http://127.0.0.1:9/shards" in str(error.value)


def test_a_server_that_never_answers_is_given_up_with_a_line_per_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSIONZOO_PATIENCE", "0.05")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/shards"
        start = time.monotonic()
        with pytest.raises(FusionZooError, match=f"{url}/shards.json cannot be reached after 6"):
            fz.create_dataset(url)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" failed")[0] for line in lines] == [
        f"{url}/shards.json: attempt {n} of 6" for n in range(1, 6)
    ]
    assert all("imeout" in line and "\n" not in line for line in lines)
    assert time.monotonic() - start < 20


def test_a_slow_server_that_keeps_sending_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is on silence, not on the whole answer."""
    monkeypatch.setenv("FUSIONZOO_PATIENCE", "1")
    server.pause = 0.3
    start = time.monotonic()
    assert Storage(url_of(server, "parquet")).read("SHA256SUMS")
    assert time.monotonic() - start > 1.1


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", "inf"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_PATIENCE", value)
    with pytest.raises(FusionZooError, match=r"FUSIONZOO_PATIENCE is .* seconds"):
        fz.create_dataset("http://127.0.0.1:9/shards")


def test_a_server_without_ranges_is_named(server: Server) -> None:
    server.has_ranges = False
    dataset = fz.create_dataset(url_of(server, "parquet"))
    with pytest.raises(FusionZooError, match="sends whole files"):
        _ = dataset[1]


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_shard_that_is_replaced_while_it_is_read_is_an_error_that_names_its_url(
    has_index: bool, tagged: bool, tmp_path: Path
) -> None:
    """The new shard has the same rows, with other values, and bytes in the same places."""
    draw = np.random.default_rng(0)
    for folder in ("old", "new"):
        values = [{"id": f"{n}", "image": draw.bytes(999), "split": "train"} for n in range(40)]
        fz.convert(values, tmp_path / folder, shard_mb=1, block_mb=0.004)
    name = "train-00000-of-00001.parquet"
    served = tmp_path / "served"
    served.mkdir()
    for file in (tmp_path / "old").iterdir():
        if has_index or file.name == name:
            (served / file.name).write_bytes(file.read_bytes())
    old = (served / name).stat()
    with serving(tmp_path) as server:
        server.tags = {name: '"1"'} if tagged else {}
        root = url_of(server, "served") if has_index else f"file://{served}"
        assert fz.create_dataset(root).references("image")[:1]
        again = fz.create_dataset(root)
        assert again.reference("image", 0)
        (served / name).write_bytes((tmp_path / "new" / name).read_bytes())
        server.tags = {name: '"2"'} if tagged else {}
        if not tagged:
            os.utime(served / name, (old.st_atime + 5, old.st_mtime + 5))
        with pytest.raises(FusionZooError, match=rf"{name} was replaced while it was read"):
            again.reference("image", 39)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(FusionZooError, match=r"pip install 'fusionzoo\[s3\]'"):
        fz.create_dataset("s3://bucket/shards")


def test_an_index_that_leads_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    text = (folder / "parquet" / "shards.json").read_text()
    first = text.index('"name": "') + len('"name": "')
    (tmp_path / "shards.json").write_text(text[:first] + "../" + text[first:])
    with pytest.raises(FusionZooError, match="is no file of the folder"):
        fz.create_dataset(tmp_path)


def test_each_process_reads_a_block_once(server: Server) -> None:
    train = fz.create_dataset(url_of(server, "parquet")).split("train").select("image")
    epoch(train, 0)
    cells = next(x for x in train.memory.values() if isinstance(x, StoredCells))
    blocking = train.blocking()
    assert blocking is not None and cells.blocks.reads == len(blocking.blocks.unique())
