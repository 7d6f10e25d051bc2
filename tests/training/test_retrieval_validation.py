"""Retrieval figures in training's validation and in `fusionzoo evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.scripts.train import main as train


def write_copies(path: Path) -> list[str]:
    """Pairs of vectors; those of `b` are the same in all samples of a split but training's."""
    lines = []
    for row in range(60):
        split = ("train", "val", "test")[row % 3]
        b = [float(row), 2.0] if split == "train" else [1.0, 2.0]
        lines.append({"id": f"s{row}", "split": split, "a": [float(row), 1.0, row % 5], "b": b})
    path.write_text("\n".join(map(json.dumps, lines)))
    data = ["--data.name", "manifest", "--data.root", str(path)]
    for name in "ab":
        data += [f"--data.columns.{name}", name, f"--data.kinds.{name}", "vector"]
    return data


def test_answers_of_equal_content_are_right_in_validation_and_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_copies(tmp_path / "data.jsonl"), tmp_path / "out"
    run = [*data, "--log", "none", "--train.epochs", "1", "--balance", "contrastive_align"]
    assert train([*run, "--objective.name", "none", "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    for split in ("val", "test"):  # 20 samples with one answer, which is right for all of them
        for name in ("a_to_b.recall@1", "a_to_b.map", "b_to_a.recall@1", "b_to_a.ndcg@10"):
            assert metrics[split][name] == pytest.approx(1)
    capsys.readouterr()
    assert main(["evaluate", str(out), *data, "--out", str(tmp_path / "m.json")]) == 0
    assert "Retrieval, with 95 % intervals" in capsys.readouterr().out
    found = json.loads((tmp_path / "m.json").read_text())["retrieval"]
    assert found["a_to_b"]["recall@1"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    settings = {"columns": {"a": "a", "b": "b"}, "kinds": {"a": "vector", "b": "vector"}}
    train_split = {"name": "manifest", "root": str(tmp_path / "data.jsonl"), **settings}
    figures = fz.evaluate(out, train_split, split="train")["retrieval"]["a_to_b"]["mrr"]
    assert figures["low"] < figures["mean"] < figures["high"]
