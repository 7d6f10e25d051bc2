"""A model behind HTTP answers as it does in Python; bad requests fail alone, and in one line."""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.tools.serve.server import ServeConfig, build_app
from helpers.serving import serving

requests = pytest.importorskip("requests")
pytestmark = pytest.mark.needs("fastapi")
NET = {"pretrained": False, "channels": [8, 8, 8, 8], "stem_width": 8}
AGE = {"name": "age", "mean": 40, "std": 12, "range": [20, 60]}
ENCODERS: dict[str, Any] = {
    "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 20},
    "image": {"name": "timm/resnet10t", "size": 32, **NET},
    "audio": {"name": "mel/stats", "rate": 8000, "num_mels": 20, "longest": 0.3},
    "numbers": {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 8, "hidden": 8},
    "table": {
        "name": "tabular/mlp",
        "kind": "tabular",
        "columns": [AGE, {"name": "hue", "values": ["red"]}],
    },
}
TOKEN = "a secret of 22 letters"
LIMITS: dict[str, Any] = {"megabytes": 0.3, "megapixels": 0.5, "seconds": 10.0, "timeout": 3.0}


def build() -> FusionModel:
    import torch

    torch.manual_seed(0)
    return create_model({"name": "gmu", "dim": 8}, ENCODERS, classes=["cat", "dog"]).eval()


@pytest.fixture(scope="module")
def model() -> FusionModel:
    return build()


@pytest.fixture(scope="module")
def url(model: FusionModel) -> Iterator[str]:
    with serving(model, **LIMITS) as address:
        yield address


def png(width: int = 40, height: int = 30) -> bytes:
    out = io.BytesIO()
    pixels = np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3)
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def wav(seconds: float = 0.5, rate: int = 8000) -> bytes:
    out = io.BytesIO()
    wave = 0.1 * np.sin(np.arange(int(seconds * rate)) / 7)
    soundfile.write(out, wave.astype(np.float32), rate, format="WAV")
    return out.getvalue()


def as_json(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}


SAMPLE: dict[str, Any] = {
    "text": "a red thing",
    "image": as_json(png()),
    "audio": as_json(wav()),
    "numbers": [1, 2.5, 3],
    "table": {"age": 31, "hue": None},
}
RAW = {**SAMPLE, "image": png(), "audio": wav()}


def test_json_and_multipart_are_answered_as_in_python(url: str, model: FusionModel) -> None:
    for names in (list(SAMPLE), ["text"], ["image", "audio"], []):
        (expected,) = model.predict([{name: RAW[name] for name in names}])
        answer = requests.post(f"{url}/predict", json={name: SAMPLE[name] for name in names})
        assert answer.status_code == 200, answer.text
        assert answer.json()["label"] == expected.label
        assert answer.json()["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)
    parts = {
        "text": (None, "a red thing"),
        "image": ("/etc/passwd", png(), "image/png"),  # its name is nothing to us
        "audio": ("a.wav", wav()),
        "numbers": (None, "[1, 2.5, 3]"),
        "table": (None, '{"age": 31, "hue": null}'),
    }
    by_parts = requests.post(f"{url}/predict?weights=true", files=parts).json()
    (expected,) = model.predict([RAW])
    assert by_parts["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)
    shares = {name: float(x[0]) for name, x in model.weights([RAW]).items()}
    assert by_parts["weights"] == pytest.approx(shares, abs=1e-6)
    assert by_parts["model"] == requests.get(f"{url}/health").json()["model"]


def test_a_threshold_decides_what_is_served_and_leaves_the_model_as_it_is(
    model: FusionModel,
) -> None:
    (before,) = model.predict([{"text": SAMPLE["text"]}])
    assert set(before.probabilities) == {"cat", "dog"}
    for limit, label in ((0.999, "cat"), (0.001, "dog")):
        with serving(model, **LIMITS, threshold=limit) as url:
            answer = requests.post(f"{url}/predict", json={"text": SAMPLE["text"]}).json()
        assert answer["label"] == label
        assert answer["probabilities"] == pytest.approx(before.probabilities, abs=1e-6)
    assert model.predict([{"text": SAMPLE["text"]}]) == [before]


def test_cells_unlike_those_of_training_are_named(url: str) -> None:
    for route in ("predict", "embed"):
        strange = {"table": {"age": "4000", "hue": "blue"}}
        assert requests.post(f"{url}/{route}", json=strange).json()["warnings"] == [
            "table: training saw nothing like age '4000'",
            "table: training saw nothing like hue 'blue'",
        ]
        usual = {"table": {"age": 99, "hue": "red"}}  # within three times the range
        assert "warnings" not in requests.post(f"{url}/{route}", json=usual).json()


def test_vectors_are_those_of_embed(url: str, model: FusionModel) -> None:
    answer = requests.post(f"{url}/embed?columns=fused,text", json=SAMPLE).json()["vectors"]
    own = model.embed([RAW])
    assert list(answer) == ["fused", "text"]
    for name, vector in answer.items():
        assert vector == pytest.approx(own[name][0].tolist(), abs=1e-6)
    refused = requests.post(f"{url}/embed?columns=sound", json=SAMPLE)
    assert (refused.status_code, "there are fused, text" in refused.text) == (422, True)


def test_several_pictures_of_a_sample_are_read(url: str, model: FusionModel) -> None:
    pictures = [png(), png(50, 20)]
    (expected,) = model.predict([{"image": pictures}])
    for request in (
        {"json": {"image": [as_json(x) for x in pictures]}},
        {"files": [("image", ("x", x)) for x in pictures]},
    ):
        answer = requests.post(f"{url}/predict", **request).json()  # type: ignore[arg-type]
        assert answer["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)


def test_one_bad_row_among_31_good_ones_fails_alone(url: str, model: FusionModel) -> None:
    rows: list[dict[str, Any]] = [
        {"text": f"thing {row}", "image": as_json(png(20 + row, 30))} for row in range(31)
    ]
    alone = model.predict(
        [{"text": f"thing {row}", "image": png(20 + row, 30)} for row in range(31)]
    )
    rows.insert(17, {"text": "broken", "image": as_json(png()[:-40])})
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda row: requests.post(f"{url}/predict", json=row), rows))
    bad = answers.pop(17)
    assert bad.status_code == 422
    assert bad.json()["error"].startswith("the file is cut off")
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.json()["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)


def test_a_row_that_only_the_model_refuses_fails_alone(model: FusionModel) -> None:
    """A vector of another width is found when the batch is run, not before."""
    with serving(model, wait_ms=300) as url, ThreadPoolExecutor(8) as pool:
        rows = [{"numbers": [1.0] * (4 if row == 3 else 3)} for row in range(8)]
        answers = list(pool.map(lambda row: requests.post(f"{url}/predict", json=row), rows))
    assert [x.status_code for x in answers] == [422 if row == 3 else 200 for row in range(8)]


def flac_of_ten_hours() -> bytes:
    """A FLAC file whose header announces ten hours at 8 kHz."""
    out = io.BytesIO()
    soundfile.write(out, np.zeros(4000, np.float32), 8000, format="FLAC")
    data = bytearray(out.getvalue())
    data[21:26] = bytes([data[21] & 0xF0]) + struct.pack(">I", 36_000 * 8_000)
    return bytes(data)


def png_bomb(side: int = 30_000) -> bytes:
    """A picture of 900 million pixels in a few kB."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side + 1) * 100)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


JSON = {"headers": {"Content-Type": "application/json"}}
HOSTILE: dict[str, tuple[dict[str, Any], int, str]] = {
    "no JSON": ({"data": b"{", **JSON}, 400, "JSON"),
    "NaN": ({"data": '{"numbers": [NaN]}', **JSON}, 400, "NaN"),
    "deep": ({"data": "[" * 100_000, **JSON}, 400, "JSON"),
    "long digits": ({"data": f'{{"numbers": [{"1" * 5000}]}}', **JSON}, 400, "JSON"),
    "a list": ({"json": [1]}, 422, "must be a JSON object"),
    "no type": ({"data": b"x"}, 415, "application/json"),
    "unknown modality": ({"json": {"txt": "a"}}, 422, "Did you mean 'text'"),
    "path as picture": ({"json": {"image": "/etc/passwd"}}, 422, "expected the image's bytes"),
    "address as picture": ({"json": {"image": "http://127.0.0.1:1/a.png"}}, 422, "bytes"),
    "path as bytes": ({"json": {"image": {"path": "/etc/passwd"}}}, 422, "bytes"),
    "path as vector": ({"json": {"numbers": "/etc/passwd.npy[0]"}}, 422, "a list of numbers"),
    "vector of text": ({"json": {"numbers": ["1", "2", "3"]}}, 422, "a list of numbers"),
    "answer that is not finite": ({"json": {"numbers": [1e30, 0, 0]}}, 422, "no finite number"),
    "huge number": ({"json": {"numbers": [1e300, 0, 0]}}, 422, "a list of numbers"),
    "cells of lists": ({"json": {"table": {"age": [1]}}}, 422, "cells by column"),
    "unknown column": ({"json": {"table": {"agee": 1}}}, 422, "age"),
    "text of numbers": ({"json": {"text": 3}}, 422, "expected text"),
    "long text": ({"json": {"text": "x" * 100_001}}, 413, "characters"),
    "half a character": ({"data": '{"text": "\\ud800"}', **JSON}, 422, "Unicode"),
    "no base64": ({"json": {"image": {"base64": "%%%"}}}, 422, "base64"),
    "empty file": ({"json": {"image": {"base64": ""}}}, 422, "empty"),
    "bomb": ({"json": {"image": as_json(png_bomb())}}, 413, "pixels"),
    "many pixels": ({"json": {"image": as_json(png(1000, 501))}}, 413, "500,000 pixels"),
    "a strip": ({"json": {"image": as_json(png(2_000, 1))}}, 422, "too large"),
    "drawing": (
        {"json": {"image": as_json(b"<svg xmlns='http://www.w3.org/2000/svg'/>")}},
        422,
        "no PNG",
    ),
    "sound as picture": ({"json": {"image": as_json(wav())}}, 422, "no PNG"),
    "picture as sound": ({"json": {"audio": as_json(png())}}, 422, "no WAV"),
    "ten hours": ({"json": {"audio": as_json(flac_of_ten_hours())}}, 413, "10 s of sound"),
    "odd rate": ({"json": {"audio": as_json(wav(rate=44_101))}}, 422, "44,101 Hz"),
    "cut sound": ({"json": {"audio": as_json(wav()[:-100])}}, 422, "cut off"),
    "many pictures": ({"json": {"image": [as_json(png())] * 17}}, 413, "1 to 16"),
    "no picture": ({"json": {"image": []}}, 413, "1 to 16"),
    "too long": ({"data": b"x" * 400_000, **JSON}, 413, "300,000"),
    "form of 3,000 fields": (
        {"files": [(str(n), (None, "x")) for n in range(3_000)]},
        400,
        "more than 64 parts",
    ),
    "a key twice": ({"data": '{"text": "a", "text": "b"}', **JSON}, 400, "'text' occurs twice"),
    **{  # a codec of the client's choice may take minutes for a megabyte
        f"{kind} in {charset}": (
            {"data": b"x", "headers": {"Content-Type": f"{kind}; boundary=x; charset={charset}"}},
            415,
            "only utf-8",
        )
        for kind in ("multipart/form-data", "application/json")
        for charset in ("punycode", "IDNA", "utf-7", "unicode_escape", "latin-1")
    },
    "text that is not UTF-8": ({"files": {"text": (None, b"caf\xe9")}}, 422, "utf-8"),
    "a field twice": ({"files": [("text", (None, "x"))] * 2}, 422, "twice"),
    "no boundary": (
        {"data": b"x", "headers": {"Content-Type": "multipart/form-data"}},
        400,
        "multipart",
    ),
    "cut parts": (
        {
            "data": b"--x\r\nContent-Disposition",
            "headers": {"Content-Type": "multipart/form-data; boundary=x"},
        },
        400,
        "multipart",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_request_is_refused_in_one_line(case: str, url: str) -> None:
    request, status, words = HOSTILE[case]
    answer = requests.post(f"{url}/predict", timeout=20, **request)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text[:300]
    assert "\n" not in answer.json()["error"]
    assert len(answer.text) < 1_000
    assert requests.post(f"{url}/predict", json={"text": "next"}).status_code == 200


def raw(url: str, data: bytes, rest: bytes = b"", pause: float = 0.0) -> bytes:
    """Send bytes, and the rest after a pause; return what comes back until the end."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        time.sleep(pause)
        if rest:
            connection.sendall(rest)
        received = b""
        try:
            while chunk := connection.recv(65_536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


def head(length: int, *more: str, kind: str = "application/json") -> bytes:
    lines = ["POST /predict HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {kind}", *more]
    lines += [f"Content-Length: {length}"] if length else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_slow_long_and_malformed_bodies_are_ended(url: str) -> None:
    started = time.monotonic()
    assert b" 408 " in raw(url, head(100) + b'{"te')  # the rest never comes
    assert time.monotonic() - started < 15
    assert b" 413 " in raw(url, head(10**9))
    chunked = head(0, "Transfer-Encoding: chunked")
    assert b" 413 " in raw(url, chunked + (b"c350\r\n" + b"x" * 50_000 + b"\r\n") * 7)
    assert b" 400 " in raw(url, chunked + b"zz\r\n")
    long = head(2, "X: " + "x" * 70_000) + b"{}"
    assert b" 400 " in raw(url, long[:30_000], long[30_000:], pause=0.3)
    assert requests.post(f"{url}/predict", json={"text": "next"}).status_code == 200


def test_a_token_is_asked_for_wherever_it_is_set(model: FusionModel) -> None:
    with serving(model, token=TOKEN) as url:
        for sent in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
            headers = {"Authorization": sent} if sent else {}
            for route in ("metrics", "openapi.json", "other"):
                assert requests.get(f"{url}/{route}", headers=headers).status_code == 401
            assert requests.post(f"{url}/predict", json={}, headers=headers).status_code == 401
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert requests.post(f"{url}/predict", json={}, headers=right).status_code == 200
        assert requests.get(f"{url}/health").json()["status"] == "ok"


def test_other_machines_may_ask_only_with_a_token(
    model: FusionModel, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FusionZooError, match=r"--host 0\.0\.0\.0 lets other machines ask"):
        build_app(ServeConfig(host="0.0.0.0"), model)
    with pytest.raises(FusionZooError, match="at least 16"):
        build_app(ServeConfig(token="short"), model)
    monkeypatch.setenv("FUSIONZOO_TOKEN", TOKEN)
    build_app(ServeConfig(host="0.0.0.0"), model)
    by_name = requests.get(f"{url}/health", headers={"Host": "evil.example"})
    for name in ("[::1]:80", "localhost", "127.0.0.1:1"):
        assert requests.get(f"{url}/health", headers={"Host": name}).status_code == 200
    wrong = (by_name, requests.get(f"{url}/nothing"), requests.get(f"{url}/predict"))
    assert [(x.status_code, "error" in x.json()) for x in wrong] == [
        *((400, True), (404, True), (405, True))
    ]
    assert by_name.status_code == 400  # a page whose name was made to point here


def test_a_full_queue_is_503_and_says_when_to_ask_again(
    model: FusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run, runs, run = threading.Event(), threading.Event(), FusionModel.embed_and_answer

    def wait_and_run(self: FusionModel, batch: Any) -> Any:
        runs.set()
        assert may_run.wait(30)
        return run(self, batch)

    monkeypatch.setattr(FusionModel, "embed_and_answer", wait_and_run)
    with serving(model, waiting=4, batch_size=1) as url, ThreadPoolExecutor(12) as pool:
        ask = partial(pool.submit, requests.post, f"{url}/predict")
        asked = [ask(json={"text": "first"})]
        assert runs.wait(20)  # or a request that finds the queue full stood before it
        asked += [ask(json={"text": str(n)}) for n in range(11)]
        deadline = time.monotonic() + 20
        while sum(x.done() for x in asked) < 7 and time.monotonic() < deadline:
            time.sleep(0.02)
        may_run.set()
        answers = [x.result() for x in asked]
    refused = [x for x in answers if x.status_code == 503]
    assert len(refused) == 7  # one runs, four wait
    assert refused[0].headers["Retry-After"] == "1"
    assert sum(x.status_code == 200 for x in answers) == 5


def test_logs_and_counters_name_requests_and_no_content(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fusionzoo.serve")
    answer = requests.post(f"{url}/predict", json={"text": "my secret words"})
    request_id = answer.headers["X-Request-ID"]
    requests.post(f"{url}/predict", json={"my secret key": 1})
    deadline = time.monotonic() + 5
    while len(caplog.messages) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any(x.startswith(f"{request_id} POST /predict 200 ") for x in caplog.messages)
    assert "secret" not in caplog.text
    text = requests.get(f"{url}/metrics").text
    assert 'fusionzoo_requests_total{route="/predict",status="200"}' in text
    assert "fusionzoo_batches_total" in text


def test_openapi_describes_the_model_s_own_modalities(url: str) -> None:
    paths = requests.get(f"{url}/openapi.json").json()["paths"]
    content = paths["/predict"]["post"]["requestBody"]["content"]
    assert list(content["application/json"]["schema"]["properties"]) == list(SAMPLE)
    assert content["multipart/form-data"]["schema"]["properties"]["image"]["format"] == "binary"
    assert {"/embed", "/search", "/health", "/metrics"} <= set(paths)


def test_search_returns_the_nearest_rows_and_no_path(model: FusionModel, tmp_path: Path) -> None:
    data = [{"id": f"s{n}", "text": f"thing {n}", "target": "cat"} for n in range(5)]
    model.save(tmp_path / "model")
    fusionzoo.embed(str(tmp_path / "model"), data, out=str(tmp_path / "emb.parquet"), split="all")
    with serving(model, index=str(tmp_path / "emb.parquet")) as url:
        found = requests.post(f"{url}/search?k=2", json={"text": "thing 3"})
        assert found.status_code == 200, found.text
        assert found.json()["hits"][0]["id"] == "s3"
        assert len(found.json()["hits"]) == 2
        assert str(tmp_path) not in found.text
        queries = (("k=0", "from 1 to"), ("k=0000000019999", "from 1 to"), ("by=sound", "sound"))
        for query, words in queries:
            refused = requests.post(f"{url}/search?{query}", json={"text": "thing"})
            assert (refused.status_code, words in refused.text) == (422, True), refused.text
        assert requests.post(f"{url}/search", json={}).status_code == 422


def test_without_an_index_search_says_how_to_give_one(url: str) -> None:
    answer = requests.post(f"{url}/search", json={"text": "thing"})
    assert (answer.status_code, "--index" in answer.text) == (404, True)


def test_the_client_of_the_docs_works(
    url: str,
    model: FusionModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (client,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(client.splitlines()) <= 20
    (dockerfile,) = re.findall(r"```dockerfile\n(.*?)```", page, re.DOTALL)
    assert len(dockerfile.splitlines()) <= 25
    (tmp_path / "photo.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)
    exec(compile(client.replace("http://127.0.0.1:8000", url), "serve.md", "exec"), {})
    raw_sample = {"text": "a red bird", "image": png()}
    (expected,) = model.predict([raw_sample])
    answered, vector = capsys.readouterr().out.splitlines()
    probabilities = ast.literal_eval(answered.partition("}")[0] + "}")
    assert probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    own = model.embed([raw_sample])["fused"][0].tolist()
    assert json.loads(vector) == pytest.approx(own, abs=1e-6)


@pytest.mark.slow
def test_sigterm_answers_what_waits(tmp_path: Path) -> None:
    build().save(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fusionzoo", "serve", str(tmp_path / "model")]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen([*command, "--port", str(port)], cwd=tmp_path, stderr=file)
    url, body = f"http://127.0.0.1:{port}", json.dumps({"text": "thing"}).encode()
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                requests.get(f"{url}/health", timeout=5)
                break
            except requests.ConnectionError:
                assert server.poll() is None, log.read_text()
                time.sleep(0.2)
        with ThreadPoolExecutor(20) as pool:
            sent = [
                pool.submit(raw, url, head(len(body)) + body[:5], body[5:], 2.0) for _ in range(20)
            ]
            time.sleep(1.0)
            server.send_signal(signal.SIGTERM)  # all of them are half read
            answers = [x.result() for x in sent]
        assert sum(b" 200 " in x and b'"label"' in x for x in answers) == 20
        assert server.wait(30) in (0, -signal.SIGTERM)
    finally:
        if server.poll() is None:
            server.kill()


@pytest.mark.slow
def test_memory_stays_after_300_hostile_requests(url: str) -> None:
    draw = random.Random(0)
    cases = [x for x in HOSTILE if x != "form of 3,000 fields"]
    for case in cases:  # once each, so that what libraries keep is there
        requests.post(f"{url}/predict", timeout=20, **HOSTILE[case][0])
    before = resident()
    statuses = []
    for _ in range(300):
        request, _, _ = HOSTILE[draw.choice(cases)]
        statuses.append(requests.post(f"{url}/predict", timeout=20, **request).status_code)
    assert {*statuses} <= {400, 408, 413, 415, 422}
    assert resident() - before < 50_000_000
    assert requests.post(f"{url}/predict", json=SAMPLE).status_code == 200


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() if os.name == "posix" else 0
