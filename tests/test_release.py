"""A release's version, workflow and steps agree; `.ci/release` refuses a tag that does not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fusionzoo

ROOT = Path(__file__).parents[1]
VERSIONED = ("fusionzoo/ground/version.py", "CHANGELOG.md", "CITATION.cff", ".ci/release")


@pytest.fixture
def versioned(tmp_path: Path) -> Path:
    """Copy what states the version, and the script that compares it."""
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def version(root: Path, *tag: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / ".ci" / "release"), "version", *tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def date(root: Path, day: str) -> None:
    """Put a date of release into the copied changelog and citation."""
    changelog, citation = root / "CHANGELOG.md", root / "CITATION.cff"
    heading = f"## {fusionzoo.__version__} ({day})"
    text = re.sub(r"^## [0-9].*$", heading, changelog.read_text(), count=1, flags=re.MULTILINE)
    changelog.write_text(text)
    citation.write_text(f'{citation.read_text()}date-released: "{day}"\n')


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def test_package_changelog_and_citation_state_the_same_version() -> None:
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heading
    assert heading[1] == fusionzoo.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fusionzoo.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])
    assert citation["abstract"] == project["description"]
    assert version(ROOT).returncode == 0


@pytest.mark.parametrize("name", VERSIONED[:3])
def test_a_version_that_differs_in_one_place_is_refused(name: str, versioned: Path) -> None:
    path = versioned / name
    path.write_text(path.read_text().replace(fusionzoo.__version__, "9.9.9"))
    refused = version(versioned)
    assert refused.returncode == 1
    assert "the versions differ" in refused.stderr
    assert refused.stdout.count("9.9.9") == 1


def test_a_tag_needs_the_version_and_a_date(versioned: Path) -> None:
    tag = f"v{fusionzoo.__version__}"
    assert "needs v" in version(versioned, "v9.9.9").stderr
    if "unreleased" in (versioned / "CHANGELOG.md").read_text():
        assert "a release needs its date" in version(versioned, tag).stderr
        date(versioned, "2027-01-31")
    assert version(versioned, tag).returncode == 0
    changelog = versioned / "CHANGELOG.md"
    changelog.write_text(re.sub(r"\((\d{4})-", "(1999-", changelog.read_text(), count=1))
    assert "a release needs its date" in version(versioned, tag).stderr


def test_the_release_is_tried_on_the_oldest_and_newest_python_and_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = workflow("release.yml")["jobs"]["try"]["strategy"]["matrix"]
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert matrix["python-version"] == [pythons[0], pythons[-1]]
    assert project["requires-python"] == f">={pythons[0]}"
    assert workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python-version"] == pythons
    (oldest,) = re.findall(r'"torch>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert matrix["torch"] == [f"{oldest}.*", ""]


def test_only_a_pushed_tag_is_published_after_the_trial_and_with_attestations() -> None:
    jobs = workflow("release.yml")["jobs"]
    publish = jobs["publish"]
    assert (jobs["try"]["needs"], publish["needs"]) == ("build", "try")
    assert publish["if"] == "github.event_name == 'push'"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["with"] == {"attestations": True}
    assert workflow("release.yml")[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true


def test_make_release_check_runs_every_step_of_the_workflow() -> None:
    jobs = workflow("release.yml")["jobs"].values()
    steps = [step.get("run", "") for job in jobs for step in job["steps"]]
    in_workflow = {step.split()[1] for step in steps if step.startswith(".ci/release")}
    makefile = (ROOT / "Makefile").read_text()
    assert in_workflow == set(re.findall(r"\.ci/release (\w+)", makefile))
    assert in_workflow == {"version", "build", "models", "try"}


@pytest.mark.nightly
def test_a_tagged_clone_passes_the_steps_of_a_release_without_a_network(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in listed:
        if os.path.lexists(ROOT / name):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name, follow_symlinks=False)
    date(clone, "2027-01-31")
    git(clone, "init", "--quiet")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--no-verify", "--message", "Release")
    git(clone, "tag", f"v{fusionzoo.__version__}")
    done = subprocess.run(
        ["make", "release-steps"], cwd=clone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"tag v{fusionzoo.__version__}" in done.stdout
    assert done.stdout.count("PASSED") == 2
    assert "fusion: gmu" in done.stdout


def git(folder: Path, *command: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = subprocess.run(
        ["git", *who, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
