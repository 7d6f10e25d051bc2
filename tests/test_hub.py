"""Models on the Hub: pushed, loaded, resumed, refused; against a stand-in on 127.0.0.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fusionzoo as fz
from fusionzoo.hub import is_repository

TESTS = Path(__file__).parent
SIDE = ["config.json", "digests.json"]


def session(scratch: Path, step: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.hub_session", str(scratch), step],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.slow
def test_models_are_pushed_to_the_hub_and_loaded_from_it(tmp_path: Path) -> None:
    said = session(tmp_path, "main")
    assert said["address"].endswith("/me/stamps")
    assert {*SIDE, "README.md", "model.safetensors", "text/tokenizer.json"} <= {*said["pushed"]}
    assert said["leaks"] == []  # no path of this machine
    assert said["equal"]
    assert said["branches"] == [2, 3]
    assert said["pushed again"]

    assert 'fz.load("me/stamps")' in said["card"]
    assert "2 classes" in said["card"]
    assert "3 classes" in said["card again"]  # nobody had edited it
    assert said["edited card"] == "My own words."
    assert said["own card"] == "My own words."

    assert "no model me/nothing" in said["missing"]
    assert said["revision"] == "me/stamps has no branch, tag or commit 'four'"
    assert "the token may not do this" in said["token"]
    assert "or it is private" in said["private"]
    assert said["private with a token"]

    assert said["cut"]
    assert said["parts"][0] == ""
    assert said["parts"][1].startswith("bytes=")
    assert "model.safetensors was changed" in said["tampered"]
    assert "text/model.py is of no kind" in said["text/model.py"]
    assert "text/weights.bin is of no kind" in said["text/weights.bin"]
    assert "must map the names of files in the folder" in said["../../out.json"]
    assert "plugins=['evil.py']" in said["plugins"]
    assert said["read before"] == SIDE  # no weights
    errors = [x for x in said.values() if isinstance(x, str) and not x.startswith(("---", "http"))]
    assert all("\n" not in error for error in errors)

    said = session(tmp_path, "offline")
    assert said["equal"]
    assert "the cache does not hold me/unknown" in said["unknown"]
    assert said["asked"] == []


def test_only_a_name_that_no_folder_has_is_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_repository("me/stamps")
    for name in ("stamps", "a/b/c", "runs/a", "models/a", "./a", "../a", "/tmp/a", Path("me/a")):
        assert not is_repository(name), name
    with pytest.raises(fz.FusionZooError, match="the Hub is not asked, as there is a folder 'mod"):
        fz.load("models/a")
    with pytest.raises(fz.FusionZooError, match="revision='x' is for models of the Hub"):
        fz.load("models/a", revision="x")


def test_a_name_that_is_none_of_a_repository_is_refused_before_anything_is_sent() -> None:
    model = fz.create_model(
        "mean", {"a": {"name": "vector/identity", "kind": "vector", "in_dim": 3}}, 2
    )
    with pytest.raises(fz.FusionZooError, match="'stamps' is no name of a repository"):
        model.push_to_hub("stamps")
