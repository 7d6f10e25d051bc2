"""Papers, trained again: their files checked, every seed once, and what is said of the figures."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.io import savemat

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.config.flags import papers, recipes
from fusionzoo.fusion import list_fusions
from fusionzoo.tools import reproduce as module
from fusionzoo.tools.reproduce import compare, read_paper, run_settings
from fusionzoo.training.report import Run

FILE = "views.mat"
IDENTITY = {"name": "vector/identity", "freeze": "all"}


def write_data(folder: Path) -> Path:
    """Write two views of 24 training and 8 test samples."""
    labels, draw = np.arange(32) % 2, np.random.default_rng(0)
    views = {name: labels[:, None] + draw.normal(size=(32, 3)) for name in ("x1", "x2")}
    arrays = {"gt": labels[:, None], **views}
    parts = {"train": slice(24), "test": slice(24, 32)}
    savemat(
        folder / FILE,
        {
            f"{name}_{part}": array[rows]
            for name, array in arrays.items()
            for part, rows in parts.items()
        },
    )
    return folder / FILE


def write_paper(data: Path, **changes: Any) -> Path:
    """Write a paper of one epoch on this file."""
    link = {"link": "https://example.org/a", "licence": "none stated"}
    paper = {
        "title": "two views x tmc",
        "paper": {"citation": "Nobody, Nothing", "year": 2021, "link": "https://example.org"},
        "code": {"repository": "https://example.org/b", "commit": "0" * 40, "licence": "MIT"},
        "files": [{"name": FILE, "sha256": hashlib.sha256(data.read_bytes()).hexdigest(), **link}],
        "metric": "accuracy",
        "epoch": "the last",
        "published": {"mean": 90.0, "spread": 1.0},
        "run": {
            "encoders": {"x1": IDENTITY, "x2": IDENTITY},
            "fusion": {"name": "tmc"},
            "train": {"epochs": 1, "select": "last", "unimodal": False, "num_workers": 0},
            "log": "none",
        },
        **changes,
    }
    path = data.parent / "paper.yaml"
    path.write_text(yaml.safe_dump(paper))
    return path


def test_every_seed_is_trained_once_and_the_table_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paper, out = write_paper(write_data(tmp_path)), tmp_path / "out"
    words = ["reproduce", str(paper), "--data", str(tmp_path), "--out", str(out), "--seeds"]
    assert main([*words, "2"]) == 0
    printed = capsys.readouterr().out
    assert "published" in printed
    assert "protocol unknown" in printed
    results = json.loads((out / "results.json").read_text())
    assert (results["name"], results["published"]["mean"]) == ("paper", 90.0)
    stored = [Run(out / f"seed-{seed}").metrics["test"]["accuracy"] for seed in (0, 1)]
    assert results["ours"]["values"] == [100 * value for value in stored]

    monkeypatch.setattr(module, "train", lambda cfg, world: Run(Path(cfg.out), exit_code=130))
    again = fz.reproduce(paper, tmp_path, seeds=2, out=out)
    assert again.to_dict() == results
    assert main([*words, "3"]) == 130, "the third seed was stopped"
    assert "the same command goes on" in capsys.readouterr().out

    write_paper(tmp_path / FILE, run={"fusion": {"name": "sum"}})
    assert main([*words, "2"]) == 2
    assert "holds runs with other settings" in capsys.readouterr().err


def test_a_file_that_is_not_the_paper_s_is_refused_by_name(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    paper = write_paper(data)
    contents = data.read_bytes()
    data.write_bytes(contents + b"\0")
    digest = hashlib.sha256(contents + b"\0").hexdigest()
    with pytest.raises(
        fz.FusionZooError, match=rf"{FILE} is not the paper's file.*{digest}.*org/a"
    ):
        fz.reproduce(paper, tmp_path)
    data.unlink()
    with pytest.raises(fz.FusionZooError, match=f"no {FILE} in .*example.org/a .*none stated"):
        fz.reproduce(paper, tmp_path)
    assert not Path("runs/paper").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": "accuracy"}, "metrics: unexpected"),
        ({"published": {"spread": 1.0}}, "published.mean: field required"),
        ({"files": []}, "name at least one data file"),
        ({"run": {"train": {"epoch": 1}}}, "paper.yaml: run: unknown setting --train.epoch"),
    ],
)
def test_a_paper_with_a_mistake_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(fz.FusionZooError, match=message):
        read_paper(str(write_paper(write_data(tmp_path), **changes)))


AROUND_90 = [89.0, 90.0, 91.0]  # std 1, so two standard errors of a difference are 1.63


@pytest.mark.parametrize(
    ("authors", "ours", "paired", "said"),
    [
        (AROUND_90, [90.6, 91.6, 92.6], False, "equal"),
        (AROUND_90, [90.7, 91.7, 92.7], False, r"differs by \+1.70 points"),
        (AROUND_90, [87.3, 88.3, 89.3], False, r"differs by -1.70 points"),
        (AROUND_90, [89.1, 90.1, 91.1], True, r"differs by \+0.10 points"),  # on every split
        (AROUND_90, [89.0, 90.0, 91.3], True, "equal"),  # 0.1, and two standard errors are 0.2
        (AROUND_90, [89.0, 90.0], True, "equal"),  # of the splits that both have
        ([90.0, 90.0], [90.0, 90.0], False, "equal"),
        ([90.0, 90.0], [91.0, 91.0], False, "differs by"),
        ([90.0, 91.0], [91.0], False, r"\+0.50 points .*too few"),
        ((), AROUND_90, False, "protocol unknown"),
    ],
)
def test_figures_within_two_standard_errors_are_equal(
    authors: list[float], ours: list[float], paired: bool, said: str
) -> None:
    assert re.match(said, compare(authors, ours, paired=paired))


def test_each_seed_of_a_paper_with_random_splits_has_its_own_split(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    run = {
        "data": {"shares": [0.5, 0, 0.5]},
        "encoders": {"x1": IDENTITY, "x2": IDENTITY},
        "fusion": {"name": "tmc"},
        "train": {"epochs": 1, "select": "last", "unimodal": False, "num_workers": 0},
        "log": "none",
    }
    authors = {"values": [50.0, 50.0], "source": "a test"}
    paper = write_paper(data, run=run, repeat="split", authors=authors)
    done = fz.reproduce(paper, tmp_path, seeds=2, out=tmp_path / "out")
    tested = []
    for seed in (0, 1):
        settings = yaml.safe_load((tmp_path / "out" / f"seed-{seed}" / "config.yaml").read_text())
        opened = fz.create_dataset(**settings["data"])
        tested.append(
            [
                key
                for key, split in zip(opened.ids, opened.split_names, strict=True)
                if split == "test"
            ]
        )
        order = np.random.RandomState(seed).permutation(32)
        assert tested[-1] == [f"{row}" for row in sorted(order[16:])]
    assert tested[0] != tested[1]
    assert done.to_dict()["repeat"] == "split"
    assert done.verdict == compare([50.0, 50.0], done.values, paired=True)


def test_the_papers_that_come_with_fusionzoo_have_all_facts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    assert papers()
    assert not [name for name in recipes() if "papers" in name]
    for name in papers():
        assert name in listed
        paper = read_paper(name)[1]
        settings = run_settings(paper, Path("data"))
        assert settings.fusion["name"] in list_fusions()
        assert re.fullmatch("[0-9a-f]{40}", paper.code.commit)
        links = [paper.paper.link, paper.code.repository, *(file.link for file in paper.files)]
        assert all(link.startswith("https://") for link in links)
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in paper.files)
        assert paper.published is None or paper.published.source
        assert paper.authors is None or paper.authors.source
