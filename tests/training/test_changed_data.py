"""A run that goes on, and a model that is evaluated, on data that are not what they were."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fusionzoo as fz
from fusionzoo.benchmark import prepare
from fusionzoo.benchmark.bench import open_bench
from fusionzoo.benchmark.prepare import build_encoders
from fusionzoo.benchmark.schedule import list_jobs, path_of
from fusionzoo.cli import evaluate_command, main
from fusionzoo.config import BenchmarkConfig, from_args
from fusionzoo.datasets import create_dataset
from fusionzoo.datasets.shards.blocks import ParquetBlocks
from fusionzoo.datasets.shards.write import Settings, write_shards
from fusionzoo.errors import FusionZooError
from fusionzoo.inputs.identity import changes, data_identity
from fusionzoo.scripts.train import main as train

Rows = list[dict[str, Any]]
LABELS = ("a", "b", "c")


def rows() -> Rows:
    splits = ("train", "train", "val", "test")
    return [
        {
            "id": f"s{row}",
            "split": splits[row % 4],
            "target": LABELS[row % 3],
            "text": f"{LABELS[row % 3]} thing {row}",
            "vector": [float(row % 3), 1.0 + row],
            "sequence": f"{row}.npy",
        }
        for row in range(24)
    ]


def write(folder: Path, samples: Rows) -> Path:
    for row in range(24):
        if not (folder / f"{row}.npy").exists():
            np.save(folder / f"{row}.npy", np.full((2, 2), row, np.float32))
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    return path


def flags(data: Path, out: Path) -> list[str]:
    named = ["--data.name", "manifest", "--data.root", str(data), "--out", str(out)]
    named += ["--encoders.text.name", "chars"]
    return [*named, "--train.epochs", "1", "--train.unimodal", "false", "--log", "none"]


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "targets and classes (a, b, c; now x, y, z)": lambda row: {
        "target": "xyz"[LABELS.index(row["target"])]
    },
    "targets": lambda row: {"target": LABELS[LABELS.index(row["target"]) - 1]},
    "splits": lambda row: {"split": {"train": "test", "test": "train"}.get(row["split"], "val")},
    "values of vector": lambda row: {"vector": [-x for x in row["vector"]]},
    "values of text": lambda row: {"text": row["text"].replace("thing 3", "another thing")},
    "values of sequence": lambda row: {},  # a file of another content
}


def write_changed(folder: Path, what: str, samples: Rows) -> Rows:
    """Write samples of which something has changed, and return them."""
    if what == "values of sequence":
        np.save(folder / "5.npy", np.full((2, 2), -5, np.float32))
        before = (folder / "4.npy").stat()
        os.utime(folder / "5.npy", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = [row | CHANGES[what](row) for row in samples]
    write(folder, changed)
    return changed


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path]:
    """A small run that ended, and its data."""
    data = write(tmp_path, rows())
    assert train(flags(data, tmp_path / "run")) == 0
    return data, tmp_path / "run"


@pytest.mark.parametrize("what", CHANGES)
def test_a_run_goes_on_with_the_data_that_it_was_trained_on_alone(
    what: str, run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = run
    write_changed(data.parent, what, rows())
    before = (out / "checkpoints" / "last.pt").read_bytes()
    assert train(["--resume", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"was trained on data with other {what}: bring those back" in said
    assert said.count("\n") == 1
    assert (out / "checkpoints" / "last.pt").read_bytes() == before
    assert train(["--resume", "anyway", "--out", str(out), "--train.epochs", "2"]) == 0
    assert f"going on with data with other {what}: --resume anyway" in capsys.readouterr().out
    assert train(["--resume", "--out", str(out)]) == 0  # the data are now the run's


@pytest.mark.parametrize("flag", [["--data.root"], []])
def test_the_same_data_in_another_folder_are_the_same(
    flag: list[str], run: tuple[Path, Path]
) -> None:
    data = run[0]
    moved = data.parent.rename(f"{data.parent}-{len(flag)}")
    named = [*flag, str(moved / "data.jsonl")]
    assert train(["--resume", "--out", str(moved / "run"), *named]) == 0


@pytest.mark.parametrize("what", CHANGES)
def test_trials_of_a_benchmark_are_those_of_their_data(what: str, tmp_path: Path) -> None:
    data = write(tmp_path, rows())
    words = ["--data.name", "manifest", "--data.root", str(data), "--folds", "0"]
    cfg = from_args(BenchmarkConfig, [*words, "--tune", "0", "--mode", "finetune"])

    def path() -> Path:
        bench, _ = open_bench(cfg)
        return path_of(bench, list_jobs(bench, ["concat"])[0])

    before = path()
    assert path() == before
    write_changed(tmp_path, what, rows())
    assert path() != before


def test_an_encoder_that_was_trained_alone_is_that_of_its_labels(tmp_path: Path) -> None:
    data = write(tmp_path, rows())
    words = ["--data.name", "manifest", "--data.root", str(data), "--folds", "0"]
    cfg = from_args(BenchmarkConfig, [*words, "--encoders.text.name", "chars"])

    def path() -> Path:
        bench, dataset = open_bench(cfg)
        return prepare._path(bench, dataset, 0, build_encoders(cfg, dataset, "text")["text"])

    before = path()
    write_changed(tmp_path, "targets", rows())
    assert path() != before


def test_what_identifies_shards_is_known_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = create_dataset("manifest", root=str(write(tmp_path, rows())))
    write_shards(data, tmp_path / "shards", Settings())
    monkeypatch.setattr(ParquetBlocks, "_load", None)
    opened = create_dataset("manifest", root=str(tmp_path / "shards"))
    before = data_identity(opened)
    assert data_identity(create_dataset("manifest", root=str(tmp_path / "shards"))) == before
    shard = next((tmp_path / "shards").glob("*.parquet"))
    os.utime(shard, ns=(1, 1))
    assert changes(before, data_identity(opened)) == "values of vector and values of sequence"


def test_a_model_is_evaluated_on_its_own_data_unless_others_are_named(
    run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    measured = json.loads((run[1] / "metrics.json").read_text())["test"]
    metrics = fz.evaluate(run[1])
    assert {name: metrics[name] for name in measured} == pytest.approx(measured)
    assert metrics["seen_in_training"] == {"train": 0, "val": 0}
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("place", ["root", "join"])
def test_files_that_a_stranger_s_model_names_are_not_opened_unasked(
    place: str, run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("id,text,target\nx,secret,a\n")
    model = fz.load(run[1])
    assert model.trained_on is not None
    join = {"root": str(run[0]), "join": {"more": {"root": str(secret)}}}
    named = {"name": "manifest", **({"root": str(secret)} if place == "root" else join)}
    model.trained_on = replace(model.trained_on, settings=named)
    model.save(tmp_path / "model")
    with pytest.raises(FusionZooError, match="which is opened only if you name it"):
        fz.evaluate(tmp_path / "model")
    for command in ("predict", "embed"):
        words = [command, str(tmp_path / "model"), "--out", str(tmp_path / "out.parquet")]
        assert main(words) == 2
        assert "which is opened only if you name it" in capsys.readouterr().err
    if place == "join":  # which another file alone does not replace
        with pytest.raises(FusionZooError, match=r"secret\.csv, as it says"):
            fz.evaluate(tmp_path / "model", str(run[0]))
    else:
        assert fz.evaluate(tmp_path / "model", str(run[0]))["loss"] > 0
        words = [str(tmp_path / "model"), str(run[0]), "--out", str(tmp_path / "out.parquet")]
        assert main(["predict", *words]) == 0


@pytest.mark.parametrize("with_ids", [True, False], ids=["ids", "row numbers"])
def test_samples_that_a_model_was_trained_on_are_counted_when_it_is_evaluated(
    with_ids: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [{name: row[name] for name in row if with_ids or name != "id"} for row in rows()]
    data, out = write(tmp_path, samples), tmp_path / "run"
    assert train(flags(data, out)) == 0
    samples = write_changed(tmp_path, "splits", samples)
    words = ["--data.name", "manifest", "--data.root", str(data), "--out", str(tmp_path / "m.json")]
    assert evaluate_command([str(out), *words, "--split", "all"]) == 0
    what = "ids" if with_ids else "contents"
    warning = f"of the 24 samples, 12 have {what} that the model was trained on and 6 {what}"
    assert capsys.readouterr().out.count(warning) == 1
    metrics = json.loads((tmp_path / "m.json").read_text())
    assert metrics["seen_in_training"] == {"train": 12, "val": 6}
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", samples[::-1])  # row numbers are those of other samples
    seen = fz.evaluate(out, str(other), split="all")["seen_in_training"]
    assert seen == {"train": 12, "val": 6}
    answers = fz.predict(out, str(other), split="all")
    marks = answers["seen_in_training"].to_pylist()
    assert sum(marks) == 18
    new = [row for row, is_seen in zip(samples[::-1], marks, strict=True) if not is_seen]
    answers = fz.predict(out, str(write(tmp_path / "other", new)))
    assert len(answers) == 6 and "seen_in_training" not in answers.column_names


TEXTS = [f"{'wet rain' if n % 2 else 'dry sand'} {n}" for n in range(40)]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A table of texts and numbers without ids, and a run on it."""
    folder = tmp_path_factory.mktemp("numbered")
    with (folder / "data.csv").open("w") as file:
        file.write("text,age,target\n")
        file.writelines(f"{text},{n % 7},{'ab'[n % 2]}\n" for n, text in enumerate(TEXTS))
    settings: dict[str, Any] = {"encoders": {"text": "chars"}, "fusion": "mean", "epochs": 1}
    settings |= {"target": "target", "config": {"train": {"calibrate": "none"}}}
    run = fz.train(str(folder / "data.csv"), out=str(folder / "run"), **settings)
    return folder / "data.csv", run.folder


@pytest.mark.parametrize("form", ["elsewhere", "DataFrame", "Parquet", "half of it", "new rows"])
def test_rows_without_ids_are_known_again_by_their_contents(
    form: str, numbered: tuple[Path, Path], tmp_path: Path
) -> None:
    frame: Any = pd.read_csv(numbered[0])
    data = tmp_path / f"moved.{'parquet' if form == 'Parquet' else 'csv'}"
    if form == "new rows":
        frame["text"] = [f"other {n}" for n in range(len(frame))]
    if form == "half of it":
        frame = frame.iloc[::-1].iloc[: len(frame) // 2]
    if form == "Parquet":
        frame.to_parquet(data, index=False)
    else:
        frame.to_csv(data, index=False)
    given = frame if form == "DataFrame" else str(data)
    seen = fz.evaluate(numbered[1], given, split="all")["seen_in_training"]
    trained_on = fz.load(numbered[1]).trained_on
    assert trained_on is not None
    all_of_them = {split: len(ids) for split, ids in trained_on.ids.items()}
    if form == "new rows":
        assert seen == {"train": 0, "val": 0}
    elif form == "half of it":
        assert 10 <= sum(x or 0 for x in seen.values()) < 20
    else:
        assert seen == all_of_them


def test_rows_that_cannot_be_compared_are_not_known(numbered: tuple[Path, Path]) -> None:
    frame: Any = pd.read_csv(numbered[0])
    unknown = {"train": None, "val": None}
    assert fz.evaluate(numbered[1], frame.drop(columns="age"))["seen_in_training"] == unknown
    with_ids = frame.assign(id=[f"s{n}" for n in range(len(frame))])
    assert fz.evaluate(numbered[1], with_ids)["seen_in_training"] == unknown


def test_of_a_folder_that_does_not_say_what_it_was_trained_on_nothing_is_known(
    run: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fz.load(run[1])
    model.trained_on = None
    model.save(tmp_path / "model")
    capsys.readouterr()
    metrics = fz.evaluate(tmp_path / "model", str(run[0]))
    assert metrics["seen_in_training"] == {"train": None, "val": None}
    unknown = "whether the model was trained on some of these samples is not known"
    assert unknown in capsys.readouterr().out
    with pytest.raises(FusionZooError, match="model does not say what it was trained on"):
        fz.evaluate(tmp_path / "model")


def test_what_a_model_was_trained_on_is_kept_when_it_is_saved_again(
    run: tuple[Path, Path], tmp_path: Path
) -> None:
    model = fz.load(run[1])
    again = fz.load(model.save(tmp_path / "again"))
    assert again.trained_on is not None
    assert again.trained_on.settings["root"] == run[0].name
    assert {name: len(x) for name, x in again.trained_on.ids.items()} == {"train": 12, "val": 6}
    file = tmp_path / "again" / "trained_on.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(FusionZooError, match=r"trained_on.safetensors was changed"):
        fz.load(tmp_path / "again")
    (tmp_path / "again" / "digests.json").unlink()
    with pytest.raises(FusionZooError, match=r"trained_on.safetensors cannot be read"):
        fz.load(tmp_path / "again")
