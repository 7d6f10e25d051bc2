"""A stand-in for the Hugging Face Hub on 127.0.0.1: as much of its API as push and load use."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_right"  # the only one that may write, and read private repositories
REPOS: dict[str, Any] = {}  # name -> {private, branches: {branch: sha}, commits: {sha: files}}
BLOBS: dict[str, bytes] = {}  # large files that were uploaded, by SHA-256
LOG: list[tuple[str, str, str]] = []  # method, path, range
CUT: set[str] = set()  # files whose next download breaks off in the middle


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def answer(self, x: Any, status: int = 200, **headers: str) -> None:
        body = x if isinstance(x, bytes) else json.dumps(x).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET" and (file := self.path.rpartition("/")[2]) in CUT:
            CUT.remove(file)
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, url = self.path.partition("?")[0], f"http://{self.headers['Host']}"
        LOG.append((self.command, path, self.headers.get("Range", "")))
        may_write = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.command == "POST" and not may_write:
            return self.refuse(401, "the token is wrong")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name, private = f"{asked['organization']}/{asked['name']}", "private" in asked.values()
            new = {"private": private, "branches": {"main": "0"}, "commits": {"0": {}}}
            is_new = REPOS.setdefault(name, new) is new
            return self.answer({"url": f"{url}/{name}"}, 200 if is_new else 409)
        if path.startswith(("/upload/", "/api/validate-yaml")):
            BLOBS[path.rpartition("/")[2]] = body
            return self.answer({"errors": [], "warnings": []})
        found = re.match(r"(?:/api/models)?/([^/]+/[^/.]+)(?:\.git|)(?:/(.*))?", path)
        repo = REPOS.get(found[1]) if found else None
        if not (found and repo) or (repo["private"] and not may_write):
            return self.refuse(404, "RepoNotFound")
        return self.of_repository(url, repo, *(found[2] or "revision/main").split("/", 1), body)

    do_HEAD = do_POST = do_PUT = do_GET

    def of_repository(self, url: str, repo: Any, what: str, rest: str, body: bytes) -> None:
        (branch, _, file), branches = rest.partition("/"), repo["branches"]
        if what == "branch":
            return self.answer(branches.update({rest: branches["main"]}))
        if what == "info":  # the request of Git LFS where to upload large files
            for x in (large := json.loads(body)["objects"]):
                x["actions"] = {"upload": {"href": f"{url}/upload/{x['oid']}"}}
            return self.answer({"transfer": "basic", "objects": large})
        sha = branches.get(branch, branch)
        if (files := repo["commits"].get(sha)) is None:
            return self.refuse(404, "RevisionNotFound")
        if what == "preupload":
            names = [x["path"] for x in json.loads(body)["files"]]
            mode = {x: "lfs" if x.endswith("tensors") else "regular" for x in names}
            modes = [{"path": x, "uploadMode": mode[x], "shouldIgnore": 0} for x in names]
            return self.answer({"files": modes})
        if what == "commit":
            branches[branch] = sha = hashlib.sha1(body + bytes(len(LOG))).hexdigest()
            for x in [json.loads(line)["value"] for line in body.splitlines()[1:]]:
                data = BLOBS.get(x.get("oid")) or base64.b64decode(x["content"])
                repo["commits"][sha] = files = {**files, x["path"]: data}
            return self.answer({"commitUrl": f"{url}/me/x/commit/{sha}", "commitOid": sha})
        if what == "revision":
            return self.answer({"id": "me/x", "sha": sha})
        if what == "tree":
            return self.answer([{"type": "file", "path": x, "size": 0, "oid": x} for x in files])
        if file not in files:
            return self.refuse(404, "EntryNotFound")
        data, part = files[file], re.search(r"\d+", self.headers.get("Range", ""))
        start = int(part[0]) if part else 0  # of the bytes that the client lacks
        about = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": sha}
        about["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(data[start:], 206 if part else 200, **about)


def start() -> str:
    """Serve in a thread, and return the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def publish(folder: Path, name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's own process find a folder's files under a name of the hub, until it ends."""
    from huggingface_hub import constants

    address = start()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    sha = "1" * 40
    repository = {"private": False, "branches": {"main": sha}, "commits": {sha: files}}
    monkeypatch.setitem(REPOS, name, repository)
    for constant, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, constant, value)
