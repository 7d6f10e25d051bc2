"""A page in headless Chromium: what its scripts answer, what it loads, what it complains of."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, cast

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--remote-debugging-port=0"),
)
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
CATCH = """<script>
window.broken = []; window.addEventListener("error", (e) => window.broken.push(e.message));
</script>"""


def needs_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a slow test that opens a page in Debian's chromium."""
    installed = pytest.mark.skipif(not shutil.which("chromium"), reason="needs Debian's chromium")
    return cast(Callable[..., None], pytest.mark.slow(installed(test)))


def chromium(page: Path, *flags: str) -> str:
    """Open a page; return what Chromium prints."""
    command = ["chromium", *FLAGS[:-1], "--hide-scrollbars", "--disable-quic"]
    command += ["--disable-component-update", f"--user-data-dir={page.parent / 'profile'}"]
    command += [*flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def probe(page: Path, script: str, width: int, dark: bool = False) -> dict[str, Any]:
    """Run a script at the end of a page, in an iframe of this width, since a window has at least
    500 pixels; return the JSON that it posts to its parent. `window.broken` lists errors."""
    probed, outer = page.with_name("probed.html"), page.with_name("outer.html")
    text = page.read_text().replace("<head>", f"<head>{CATCH}")
    probed.write_text(text.replace("</body>", f"{script}</body>"))
    outer.write_text(
        f'<body style="margin: 0"><pre id="result"></pre><iframe src="{probed.name}"'
        f' style="border: 0; width: {width}px; height: 900px"></iframe><script>addEventListener('
        '"message", (event) => document.querySelector("#result").textContent = event.data)'
        "</script>"
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom = chromium(outer, "--dump-dom", f"--window-size={max(width, 500)},900", scheme)
    result = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert result and result[1], "the page did not report"
    found = json.loads(html.unescape(result[1]))
    assert isinstance(found, dict)
    return found


class Browser:
    """A tab of Chromium, by its debugging protocol."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.calls = socket, 0
        self.requests: list[str] = []  # URLs
        self.complaints: list[str] = []
        for domain in ("Network", "Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")

    def open(self, url: str, ready: str, seconds: float = 120) -> None:
        """Open a page and wait until an expression is true."""
        self._call("Page.navigate", url=url)
        self.wait(ready, seconds)

    def wait(self, ready: str, seconds: float = 120) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while self.run(ready) is not True:
            assert time.monotonic() < end, self.complaints
            time.sleep(0.2)

    def run(self, code: str) -> Any:
        """Run JavaScript, and wait for its result."""
        flags = {"awaitPromise": True, "returnByValue": True}
        done = self._call("Runtime.evaluate", expression=code, **flags)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> Any:
        self.calls += 1
        number = self.calls
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv())).get("id") != number:
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message["method"] in COMPLAINTS:
                self.complaints.append(json.dumps(message["params"]))
        return message["result"]


@contextmanager
def browser(chromium: str) -> Iterator[Browser]:
    """Start Chromium, and end it."""
    from websockets.sync.client import connect

    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                ports = (re.search(r"ws://[^/]+:(\d+)/", line) for line in process.stderr)
                port = next(found[1] for found in ports if found)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                    tab = next(x for x in json.load(answer) if x["type"] == "page")
                with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
                    yield Browser(socket)
            finally:
                process.terminate()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of each file."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder of static files; yield its address."""
    handler = partial(_Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def as_script(sample: Mapping[str, Any]) -> str:
    """Write a sample, whose files are named by their paths, as an object of JavaScript."""
    parts = []
    for name, value in sample.items():
        if isinstance(value, str) and Path(value).is_file():
            coded = base64.b64encode(Path(value).read_bytes()).decode()
            bytes_of = f'Uint8Array.from(atob("{coded}"), (x) => x.charCodeAt(0))'
            parts.append(f"{json.dumps(name)}: new File([{bytes_of}], {json.dumps(value)})")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return f"{{{', '.join(parts)}}}"
