"""The Python API: `fz.train`, `evaluate`, `predict`, `embed`, and the commands around them."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import fusionzoo as fz
from fusionzoo.cli import main as console
from fusionzoo.config import RunConfig, from_args, from_settings
from fusionzoo.errors import FusionZooError, as_keywords
from fusionzoo.scripts.train import main as train_command
from fusionzoo.structures import StepContext
from fusionzoo.training.trainer import Trainer

VECTORS = {"name": "interactions", "samples": 300}
QUICK: dict[str, Any] = {"epochs": 2, "num_workers": 0, "log": "none", "device": "cpu"}
QUICK_FLAGS = [
    *("--train.epochs", "2", "--train.num_workers", "0", "--log", "none", "--device", "cpu")
]
TEXTS: dict[str, Any] = {**QUICK, "encoders": {"text": {"name": "chars", "dim": 16}}}
WORDS = ("red", "green and long", "blue")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fz.Run:
    return fz.train(VECTORS, **QUICK, out=tmp_path_factory.mktemp("runs") / "a")


def make_rows(count: int = 60) -> list[dict[str, Any]]:
    """Return rows of a manifest: a text, its class, a number and several labels."""
    splits = ("train", "val", "train", "test", "train")
    return [
        {
            "id": f"row{number}",
            "split": splits[number % 5],
            "target": WORDS[number % 3].split()[0],
            "text": f"{WORDS[number % 3]} {number}",
            "age": str(number % 3 + number / 100),
            "tags": ("sun;sea", "sun", ";")[number % 3],
        }
        for number in range(count)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def weights(run: fz.Run) -> bytes:
    return (run.folder / "model" / "model.safetensors").read_bytes()


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(FusionZooError) as error:
        call()
    return str(error.value)


# ---- what `data` may be


def test_a_path_a_table_and_a_data_frame_of_the_same_rows_train_the_same_model(
    tmp_path: Path,
) -> None:
    rows = make_rows()
    path = write_csv(tmp_path / "my.csv", rows)
    tables = [pa.Table.from_pylist(rows), pd.DataFrame(rows)]
    sources = [str(path), {"name": "manifest", "root": path}, *tables]
    runs = [fz.train(data, **TEXTS, out=Path("runs") / str(n)) for n, data in enumerate(sources)]
    assert len({weights(run) for run in runs}) == 1
    stored = [from_args(RunConfig, ["--config", str(run.folder / "config.yaml")]) for run in runs]
    assert {cfg.data["name"] for cfg in stored} == {"manifest"}


def test_a_name_settings_and_an_open_data_set_train_the_same_model(run: fz.Run) -> None:
    again = fz.train(fz.create_dataset(**VECTORS), **QUICK, out="runs/open")
    assert weights(again) == weights(run)
    assert again.metrics["test"] == run.metrics["test"]
    assert fz.train(config={"data": VECTORS}, **QUICK, out="runs/b").exit_code == 0
    named = fz.train("interactions", epochs=1, num_workers=0, log="none", out="runs/name")
    assert len(named.history) == 1


def test_data_that_is_nothing_known_is_refused() -> None:
    assert "Did you mean 'digits'?" in error_of(lambda: fz.train("digit"))
    assert "data is of type int" in error_of(lambda: fz.train(3))


# ---- settings and errors are those of the command line


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"epoch": 3}, ["--epoch", "3"]),
        ({"optim": {"rate": 1}}, ["--optim.rate", "1"]),
        ({"lr": -1}, ["--optim.lr", "-1"]),
        ({"epochs": "many"}, ["--train.epochs", "many"]),
        ({"modality_lr": {"a": "fast"}}, ["--optim.modality_lr.a", "fast"]),
        ({"fusion": "gmo"}, ["--fusion.name", "gmo"]),
        ({"balance": "ogm"}, ["--balance", "ogm"]),
        ({"resume": True}, ["--resume"]),
    ],
    ids=str,
)
def test_a_mistake_has_the_message_of_the_command_line_with_keywords_for_flags(
    settings: dict[str, Any], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(lambda: fz.train(VECTORS, log="none", **settings))
    flags += ["--data.name", "interactions", "--data.samples", "300", "--log", "none"]
    assert train_command(flags) == 2
    assert as_keywords(capsys.readouterr().err.strip()) == f"error: {message}"


def test_flat_nested_and_stored_settings_are_the_same(tmp_path: Path) -> None:
    cfg = from_args(RunConfig, ["--train.epochs", "3", "--optim.modality_lr.a", "0.1"])
    tree = {"train": {"epochs": 3}, "optim": {"modality_lr": {"a": 0.1}}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert from_settings(RunConfig, {"epochs": 3, "modality_lr": {"a": 0.1}}) == cfg
    assert from_settings(RunConfig, tree) == cfg
    for config in (tree, cfg, file, str(file)):
        assert from_settings(RunConfig, {}, config) == cfg
        assert from_settings(RunConfig, {"epochs": 4}, config).train.epochs == 4


@dataclass(frozen=True)
class Section:
    width: int = 1


@dataclass(frozen=True)
class TwoSections:
    left: Section = field(default_factory=Section)
    right: Section = field(default_factory=Section)


def test_a_name_that_two_sections_have_is_refused() -> None:
    message = error_of(lambda: from_settings(TwoSections, {"width": 3}))
    assert message.startswith("width: several settings have this name; give left=")
    assert from_settings(TwoSections, {"left": {"width": 3}}).left.width == 3


def test_a_recipe_and_a_run_config_train_as_their_settings_do(run: fz.Run, tmp_path: Path) -> None:
    cfg = from_settings(RunConfig, {"data": VECTORS, **QUICK})
    assert weights(fz.train(config=cfg, out=tmp_path / "cfg")) == weights(run)
    recipe = run.folder / "config.yaml"
    assert weights(fz.train(config=recipe, out=tmp_path / "recipe")) == weights(run)


def test_the_command_line_trains_the_same_weights(run: fz.Run, tmp_path: Path) -> None:
    flags = ["--data.name", "interactions", "--data.samples", "300", *QUICK_FLAGS]
    assert train_command([*flags, "--out", str(tmp_path / "cli")]) == 0
    assert weights(fz.Run(tmp_path / "cli")) == weights(run)


# ---- a run


def test_a_run_shows_its_metrics_history_and_steps(run: fz.Run) -> None:
    assert run.exit_code == 0
    assert run.metrics == json.loads((run.folder / "metrics.json").read_text())
    assert set(run.metrics["unimodal"]) == {"a", "b"}
    assert [entry["epoch"] for entry in run.history] == [1, 2]
    assert run.steps
    assert {"step", "loss", "lr", "grad_norm"} <= run.steps[0].keys()
    assert not run.model.training


def test_a_run_shows_its_table(run: fz.Run) -> None:
    header, line, *rows = run.table().splitlines()
    assert header == "|  | accuracy | macro F1 | AUROC |"
    assert line == "| --- | ---: | ---: | ---: |"
    accuracy = f"{run.metrics['test']['accuracy']:.3f}"
    assert f"| fusion: gmu | {accuracy} |" in "\n".join(rows)
    html = run._repr_html_()
    assert html.count("<tr>") == len(rows) + 1
    assert f"<td>fusion: gmu</td><td>{accuracy}</td>" in html


def test_a_run_draws_its_losses_and_its_metric(run: fz.Run) -> None:
    from matplotlib.figure import Figure

    figure = run.plot()
    assert isinstance(figure, Figure)
    losses, metric = figure.axes
    assert [line.get_label() for line in losses.lines] == ["train", "validation"]
    drawn = [entry["val"]["accuracy"] for entry in run.history]
    assert list(metric.lines[0].get_ydata()) == drawn


def test_ctrl_c_ends_a_run_after_a_step_and_resume_finishes_it(
    run: fz.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def interrupted(trainer: Trainer, batches: Any, context: StepContext, **flags: Any) -> Any:
        if context.step == 8:  # in the second epoch
            signal.raise_signal(signal.SIGINT)
        return step(trainer, batches, context, **flags)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"train\(out='.*a', resume=True\) goes on"):
            fz.train(VECTORS, **QUICK, out=tmp_path / "a")
    finished = fz.train(out=tmp_path / "a", resume=True)
    assert finished.exit_code == 0
    assert weights(finished) == weights(run)


@pytest.mark.slow
def test_a_script_under_torchrun_trains_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import fusionzoo as fz\n"
        f"run = fz.train({VECTORS!r}, **{QUICK!r}, out='runs/two')\n"
        "assert len(run.history) == 2\n"
        "assert run.metrics['environment']['processes'] == 2\n"
    )
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_starting_processes_is_left_to_torchrun() -> None:
    message = error_of(lambda: fz.train(VECTORS, dist={"nproc": 2}, out="runs/two"))
    assert "torchrun --nproc-per-node=2" in message


# ---- evaluate


def test_evaluate_finds_the_metrics_of_the_run(run: fz.Run) -> None:
    for model in (run, run.folder, str(run.folder), run.model):
        metrics = fz.evaluate(model, VECTORS, num_workers=0, batch_size=17)
        further = {"unimodal", "calibration", "seen_in_training", "intervals", "positive"}
        assert set(metrics) == {*run.metrics["test"], *further}
        for name, value in run.metrics["test"].items():
            assert metrics[name] == pytest.approx(value, abs=1e-5)
        for name, values in run.metrics["unimodal"].items():
            assert metrics["unimodal"][name] == pytest.approx(values, abs=1e-5)


def test_evaluate_measures_every_subset_of_the_modalities(run: fz.Run) -> None:
    metrics = fz.evaluate(run, VECTORS, every_subset=True, num_workers=0)
    assert set(metrics["subsets"]) == {"a", "b"}
    for name, values in run.metrics["given_only"].items():
        assert metrics["subsets"][name] == pytest.approx(values, abs=1e-5)
    data = {**VECTORS, "num_modalities": 3}
    three = fz.train(data, **{**QUICK, "epochs": 1}, out="runs/three")
    subsets = fz.evaluate(three, data, every_subset=True, num_workers=0)["subsets"]
    assert set(subsets) == {"a", "b", "c", "a+b", "a+c", "b+c"}


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> fz.Run:
    folder = tmp_path_factory.mktemp("texts")
    return fz.train(write_csv(folder / "my.csv", make_rows()), **TEXTS, out=folder / "run")


def test_evaluate_leaves_out_samples_without_a_label(text_run: fz.Run) -> None:
    rows = make_rows()
    blank = [{**row, "target": None} if number % 4 else row for number, row in enumerate(rows)]
    some = [row for number, row in enumerate(rows) if not number % 4]
    metrics, wanted = (
        fz.evaluate(text_run, pa.Table.from_pylist(x), split="all", num_workers=0)
        for x in (blank, some)
    )
    assert metrics["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    none = pa.Table.from_pylist([{**row, "target": ""} for row in rows])
    assert "no sample has a label" in error_of(
        lambda: fz.evaluate(text_run, none, split="all", num_workers=0)
    )


# ---- a modality that no sample has


def two_texts(count: int = 40) -> list[dict[str, Any]]:
    rows = make_rows(count)
    return [{**row, "title": row["text"][:3]} for row in rows]


@pytest.fixture(scope="module")
def titled_run(tmp_path_factory: pytest.TempPathFactory) -> fz.Run:
    chars = {"name": "chars", "dim": 16}
    data = {"name": "manifest", "root": two_texts(), "kinds": {"title": "text"}}
    settings: dict[str, Any] = {**TEXTS, "encoders": {"text": chars, "title": chars}}
    return fz.train(data, **settings, out=tmp_path_factory.mktemp("runs") / "titled")


@pytest.mark.parametrize("form", ["no column", "empty cells", "empty in the split", "a data set"])
@pytest.mark.parametrize("command", ["evaluate", "predict", "embed"])
def test_a_modality_that_no_sample_has_is_named_once(
    form: str, command: str, titled_run: fz.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = two_texts()
    for row in rows:
        if form in ("no column", "a data set"):
            del row["title"]
        elif form == "empty cells" or row["split"] == "test":
            row["title"] = None
    data = fz.create_dataset(rows) if form == "a data set" else rows
    work: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: fz.evaluate(titled_run, data, split="test", num_workers=0),
        "predict": lambda: fz.predict(titled_run, data, split="test", num_workers=0),
        "embed": lambda: fz.embed(titled_run, data, split="test", out=tmp_path / "e.parquet"),
    }
    result = work[command]()
    said = [x for x in capsys.readouterr().out.splitlines() if "missing in all samples" in x]
    assert len(said) == 1
    assert said[0].startswith("warning: ")
    assert "has none: title" in said[0]
    assert "--data.columns.title" in said[0]
    if command == "evaluate":
        assert set(result["unimodal"]) == {"text"}  # no figure over no sample


def test_training_reports_no_modality_alone_over_no_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = two_texts()
    for row in rows:
        if row["split"] == "test":
            row["title"] = None
    chars = {"name": "chars", "dim": 16}
    data = {"name": "manifest", "root": rows, "kinds": {"title": "text"}}
    settings: dict[str, Any] = {**TEXTS, "encoders": {"text": chars, "title": chars}}
    run = fz.train(data, **settings, out=tmp_path / "run")
    assert set(run.metrics["unimodal"]) == {"text"}
    assert "title alone" not in capsys.readouterr().out.rpartition("Test split")[2]


# ---- names of modalities

REFUSED = ("a/b", "x.ray", "fused", "fused_64", "present_text", "aligned_text", "keys", "x" * 201)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_no_modality_can_have_is_refused_when_the_data_are_opened(name: str) -> None:
    rows = [{**row, name: row["text"]} for row in make_rows(10)]
    settings = {"kinds": {name: "text"}, "columns": {name: name}}
    message = error_of(lambda: fz.create_dataset(rows, **settings))
    assert f"{name!r} is no name of a modality" in message
    assert "my_text" in message
    named = fz.create_dataset(rows, kinds={"my_text": "text"}, columns={"my_text": name})
    assert "my_text" in named.modalities


def test_columns_of_such_names_are_read_under_others() -> None:
    rows = make_rows(40)
    texts = {"x.ray": "a", "x/ray": "b", "type": "c"}
    data = [
        {"target": row["target"], **{name: f"{x} {row['text']} words" for name, x in texts.items()}}
        for row in rows
    ]
    opened = fz.create_dataset(data, target="target")
    assert set(opened.modalities) == {"x_ray", "x_ray_", "my_type"}
    assert [str(opened[0].values[x])[0] for x in ("x_ray", "x_ray_", "my_type")] == ["a", "b", "c"]


def test_evaluate_refuses_labels_and_data_that_the_model_does_not_know(text_run: fz.Run) -> None:
    rows = make_rows()
    rows[3] = {**rows[3], "target": "gren"}
    message = error_of(lambda: fz.evaluate(text_run, pa.Table.from_pylist(rows)))
    assert "'row3'" in message
    assert "Did you mean 'green'?" in message
    assert "the model reads text; the data has a, b" in error_of(
        lambda: fz.evaluate(text_run, VECTORS)
    )


# ---- predict


def test_predict_returns_a_row_per_sample_in_the_order_of_the_data(text_run: fz.Run) -> None:
    rows = make_rows()
    table = fz.predict(text_run, pa.Table.from_pylist(rows), num_workers=0, batch_size=7)
    names = ["id", "label", "p_blue", "p_green", "p_red", "seen_in_training", "present_text"]
    assert table.column_names == names
    assert table["id"].to_pylist() == [row["id"] for row in rows]
    assert all(table["present_text"].to_pylist())
    answers = text_run.model.predict([{"text": row["text"]} for row in rows])
    for row, answer in zip(table.to_pylist(), answers, strict=True):
        assert row["label"] == answer.label
        shares = [row[f"p_{name}"] for name in ("blue", "green", "red")]
        assert math.fsum(shares) == pytest.approx(1, abs=1e-5)
        assert shares == pytest.approx(list(answer.probabilities.values()), abs=1e-5)


def test_predict_writes_csv_and_parquet_with_ids_unchanged(
    text_run: fz.Run, tmp_path: Path
) -> None:
    ids = ["=cmd|' /C calc'!A0", "-1.5", "+x", "@a", "plain"]
    data = pa.Table.from_pylist([{"id": name, "text": f"red {name}"} for name in ids])
    table = fz.predict(text_run, data, num_workers=0)
    path = fz.predict(text_run, data, num_workers=0, out=tmp_path / "new" / "p.parquet")
    assert path == tmp_path / "new" / "p.parquet"
    assert pq.read_table(path).equals(table)
    path = fz.predict(text_run, data, num_workers=0, out=tmp_path / "p.csv")
    read = pa.csv.read_csv(path).to_pylist()
    assert [row["id"] for row in read] == ids
    assert [row["label"] for row in read] == table["label"].to_pylist()
    assert [row["p_red"] for row in read] == pytest.approx(table["p_red"].to_pylist())
    assert ".parquet or .csv" in error_of(lambda: fz.predict(text_run, data, out="p.txt"))


def test_a_target_is_the_name_of_a_column_of_text_or_a_number() -> None:
    frame = pd.DataFrame({0: [n % 7 + 0.5 for n in range(60)], 1: ["a", "b"] * 30})
    run = fz.train(frame, target=1, out="runs/numbered", **{**QUICK, "epochs": 1})
    assert run.model.classes == ["a", "b"] or run.model.classes == ("a", "b")
    message = error_of(lambda: fz.train(frame, target=frame[1], out="runs/series"))
    assert message.startswith("target is of type Series; it is the name of a column")
    message = error_of(lambda: fz.train(frame, target="2", out="runs/none"))
    assert message.startswith("a table in memory has no column '2' for target=.")


@pytest.mark.parametrize("command", [fz.predict, fz.embed, fz.evaluate])
def test_the_file_that_is_read_is_not_replaced(
    command: Any, text_run: fz.Run, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(make_rows()), path)
    before = path.read_bytes()
    (tmp_path / "sub").mkdir()
    message = error_of(lambda: command(text_run, str(path), out="sub/../rows.parquet"))
    assert "out= names sub/../rows.parquet, from which the data are read" in message
    assert path.read_bytes() == before


def test_predict_says_which_modalities_a_sample_has(run: fz.Run) -> None:
    data = {**VECTORS, "missing": 0.3}
    table = fz.predict(run, data, num_workers=0)
    dataset = fz.create_dataset(**data)
    assert table["id"].to_pylist() == dataset.ids
    for column, name in enumerate(dataset.modalities):
        assert table[f"present_{name}"].to_pylist() == dataset.present[:, column].tolist()
    assert not dataset.present.all()


@pytest.mark.parametrize(
    ("targets", "metric", "columns"),
    [
        (["age"], "mae", ["label"]),
        (["tags"], "macro_f1", ["label", "p_sea", "p_sun"]),
        (
            ["age", "tags", "target"],
            "age.mae",
            [
                *("age.label", "tags.label", "tags.p_sea", "tags.p_sun"),
                *("target.label", "target.p_blue", "target.p_green", "target.p_red"),
            ],
        ),
    ],
    ids=["number", "labels", "several"],
)
def test_other_targets_are_measured_and_predicted(
    targets: list[str], metric: str, columns: list[str], tmp_path: Path
) -> None:
    rows = make_rows()
    path = write_csv(tmp_path / "my.csv", rows)
    kinds = {"age": "regression", "tags": "multilabel", "target": "classification"}
    asked = {name: kinds[name] for name in targets}
    run = fz.train(path, **TEXTS, targets=asked, fusion="concat", out="runs/targets")
    metrics = fz.evaluate(run, path, num_workers=0)
    assert metric in metrics
    for name, value in run.metrics["test"].items():
        assert metrics[name] == pytest.approx(value, abs=1e-5, nan_ok=True)
    table = fz.predict(run, path, num_workers=0)
    assert table.column_names == ["id", *columns, "seen_in_training", "present_text"]
    answers = run.model.predict([{"text": row["text"]} for row in rows])
    for name in targets:  # of a single target the answer is no dict
        values = answers if len(targets) == 1 else [answer[name] for answer in answers]
        if name != "age":
            values = [";".join(x.labels) if name == "tags" else x.label for x in values]
        found = table["label" if len(targets) == 1 else f"{name}.label"].to_pylist()
        assert found == (pytest.approx(values, abs=1e-4) if name == "age" else values)


NUMBERS = ("int", "bool", "float", "category of int")
LABELS = {
    "int": [-1, 1],
    "bool": [False, True],
    "float": [0.5, 2.0],
    "text": ["no", "yes"],
    "category": pd.Categorical(["no", "yes"]),
    "category of int": pd.Categorical([7, 3]),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("missing", [False, True])
def test_labels_leave_in_the_type_in_which_they_came(
    kind: str, missing: bool, tmp_path: Path
) -> None:
    frame = pd.DataFrame({"x": [0.0, 9.0] * 30, "y": pd.Series(LABELS[kind]).iloc[[0, 1] * 30]})
    frame = frame.reset_index(drop=True)
    if missing:  # as NaN or None, which makes floats of integers
        frame["y"] = frame["y"].where(frame.index >= 3)
    encoder = {"tabular": {"name": "tabular/mlp", "dim": 8}}
    settings = {**QUICK, "epochs": 1, "fusion": "mean", "encoders": encoder}
    fz.train(frame, target="y", **settings, out=tmp_path / "r")
    known = frame[frame["y"].notna()]
    answers = fz.predict(tmp_path / "r", known, num_workers=0, device="cpu")
    assert set(answers["label"]) <= set(known["y"])
    assert answers["label"].dtype.kind == pd.Series(known["y"].tolist()).dtype.kind
    single = fz.load(tmp_path / "r").predict([{"x": 9.0}])[0]
    assert type(single.label) is type(answers["label"].iloc[0].tolist() if kind in NUMBERS else "")
    assert single.probabilities[single.label] == single.probability


def test_a_text_file_has_the_types_that_pandas_reads_from_it(tmp_path: Path) -> None:
    rows = [{"key": n, "x": 9.0 * (n % 2), "y": n % 2, "zip": f"0{n}"} for n in range(60)]
    frame = pd.DataFrame(rows).iloc[::-1]
    frame.to_csv(tmp_path / "t.csv", index=False)
    encoder = {"tabular": {"name": "tabular/mlp", "dim": 8}}
    settings = {**QUICK, "epochs": 1, "fusion": "mean", "encoders": encoder}
    ask: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
    for key, ids in (("key", range(60)), ("zip", frame["zip"])):
        names = {"columns": {"id": key}, "kinds": {"zip": "none", "key": "none"}}
        run = fz.train(tmp_path / "t.csv", target="y", **settings, **names, out=tmp_path / key)
        answers = fz.predict(run, tmp_path / "t.csv", **ask).to_pandas()
        assert answers["label"].dtype == "int64"
        assert set(answers[key]) == set(ids)
        frame.merge(answers, on=key, validate="one_to_one")  # refuses another type


def test_a_split_of_a_frame_is_answered_with_its_part_of_the_index(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [0.0, 9.0] * 30, "y": ["a", "b"] * 30})
    frame.index = pd.Index([f"r{n}" for n in range(60)][::-1], name="row")
    encoder = {"tabular": {"name": "tabular/mlp", "dim": 8}}
    run = fz.train(
        frame, target="y", **{**QUICK, "epochs": 1}, encoders=encoder, out=tmp_path / "r"
    )
    ask: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
    whole, part = fz.predict(run, frame, **ask), fz.predict(run, frame, split="test", **ask)
    assert 0 < len(part) < len(whole)
    assert not whole.pop("seen_in_training").loc[part.index].any()
    pd.testing.assert_frame_equal(part, whole.loc[part.index])


def test_lists_of_labels_leave_as_lists(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [0.0, 9.0] * 30, "y": [[1, 20], [3]] * 30})
    encoder = {"tabular": {"name": "tabular/mlp", "dim": 8}}
    settings = {**QUICK, "epochs": 20, "lr": 0.01, "fusion": "mean", "encoders": encoder}
    run = fz.train(frame, target="y", **settings, out=tmp_path / "r")
    ask: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
    assert [*map(list, fz.predict(run, frame, **ask)["label"][:2])] == [[1, 20], [3]]
    assert run.model.predict([{"x": 9.0}])[0].labels == [3]
    fz.predict(run, frame, **ask, out=tmp_path / "p.csv")
    assert pd.read_csv(tmp_path / "p.csv")["label"].tolist()[:2] == ["1;20", "3"]


# ---- embed


def test_embed_writes_a_row_per_sample(run: fz.Run, tmp_path: Path) -> None:
    dataset = fz.create_dataset(**VECTORS)
    for number, model in enumerate((run, run.folder, run.model)):
        path = fz.embed(model, dataset, num_workers=0, out=tmp_path / f"{number}.parquet")
        table = pq.read_table(path)
        assert table["id"].to_pylist() == dataset.ids
    vectors = torch.tensor(table["fused"].to_pylist())
    wanted = run.model.embed([dataset[i] for i in range(len(dataset))])["fused"]
    torch.testing.assert_close(vectors, wanted, rtol=0, atol=1e-5)


# ---- the console commands


def test_the_command_evaluate_prints_a_table_and_writes_json(
    run: fz.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.name", "interactions", "--data.samples", "300", "--num_workers", "0"]
    out = tmp_path / "new" / "m.json"
    args = ["evaluate", str(run.folder), *flags, "--every_subset", "--out", str(out)]
    assert console(args) == 0
    printed = capsys.readouterr().out
    metrics = json.loads(out.read_text())
    assert metrics == fz.evaluate(run, VECTORS, num_workers=0, every_subset=True)
    for label in ("fusion", "a alone", "b alone", "fusion given a", "fusion given b"):
        assert label in printed
    assert f"{metrics['accuracy']:.3f}" in printed


def test_the_command_predict_writes_what_the_function_returns(
    run: fz.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.name", "interactions", "--data.samples", "300", "--num_workers", "0"]
    out = tmp_path / "p.parquet"
    assert console(["predict", str(run.folder), *flags, "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert pq.read_table(out).equals(fz.predict(run, VECTORS, num_workers=0))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["evaluate"], "--model is missing"),
        (["evaluate", "nowhere", "--data.name", "digits"], "nowhere is no model folder"),
        (["predict", "nowhere", "--data.name", "digits"], "--out is missing"),
        (["predict", "nowhere", "--dta", "digits"], "unknown setting --dta"),
    ],
    ids=" ".join,
)
def test_a_mistake_at_the_console_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_the_commands_explain_themselves(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert console([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"fusionzoo {command} runs/a" in printed
    assert "--batch_size" in printed and "--num_workers" not in printed
    assert console([command, "--help-all"]) == 0
    assert "--num_workers" in capsys.readouterr().out
