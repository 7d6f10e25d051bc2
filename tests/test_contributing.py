"""The examples in docs/plugins.md: each file works as a plugin, and in the folder it belongs in."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fusionzoo
from fusionzoo.benchmark import api, schedule
from fusionzoo.benchmark.bench import Bench, Job, conditions, open_bench, tasks_of
from fusionzoo.benchmark.examine import scored
from fusionzoo.benchmark.prepare import _entry
from fusionzoo.config import BenchmarkConfig, from_tree
from fusionzoo.encoders import Encoder
from fusionzoo.evaluation.robustness import SEVERITIES, corrupt
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.scripts.train import main as train
from fusionzoo.testing.runner import SUITES
from fusionzoo.training.balance import BALANCE
from helpers.python import run_python

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "plugins.md").read_text()
BLOCK = r"\n### [^`\n]+`(\S+\.py)`\n.*?```python\n(.*?)```"  # below a heading with a file's name
FILES = {Path(path): code for path, code in re.findall(BLOCK, TEXT, re.DOTALL)}
PLACED = {path: code for path, code in FILES.items() if len(path.parts) > 1}
NAMES = {path.parts[0]: path.stem for path in PLACED}
LISTED = """
import fusionzoo as fz
from fusionzoo.training.balance import BALANCE
print(*fz.list_fusions(), *fz.list_encoders(), *fz.list_datasets(), *BALANCE)
"""


@pytest.fixture
def plugins(tmp_path: Path, forget_plugins: Callable[[], None]) -> str:
    """Write the files beside each other and import them."""
    paths = [tmp_path / "mine" / path.name for path in FILES]
    paths[0].parent.mkdir()
    for path, code in zip(paths, FILES.values(), strict=True):
        path.write_text(code)
    words = ",".join(map(str, paths))
    load_plugins(words)
    return words


def test_there_is_one_of_each_kind() -> None:
    assert set(NAMES) == {"fusion", "encoders", "fusionzoo", "datasets"}


@pytest.mark.usefixtures("plugins")
def test_the_encoder_takes_any_text_and_ignores_padding() -> None:
    encoder = fusionzoo.create_encoder("text", NAMES["encoders"], dim=5)
    prepare = encoder.processor(False)
    texts = ["a cat", "a cat on a mat", ""]
    with torch.no_grad():
        together = encoder(prepare.collate([prepare(text) for text in texts]))
        alone = encoder(prepare.collate([prepare(texts[0])]))
    assert together.mask.sum(1).tolist() == [3, 6, 1]
    assert together.pooled.shape == (3, 5)
    torch.testing.assert_close(alone.pooled[0], together.pooled[0])


def test_all_of_them_train_together(plugins: str, tmp_path: Path) -> None:
    flags = ["--plugins", plugins, "--data", NAMES["datasets"], "--data.samples", "50"]
    flags += ["--encoders.text", NAMES["encoders"], "--fusion", NAMES["fusion"]]
    flags += ["--balance", NAMES["fusionzoo"], "--train.epochs", "1", "--log", "none"]
    flags += ["--train.log_every", "1"]
    assert train([*flags, "--out", str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["plugins"] == ["product.py", "words.py"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert f"{NAMES['fusionzoo']}/text" in lines
    model = fusionzoo.load(tmp_path / "run")
    assert isinstance(model.encoders["text"], Encoder)
    assert model.predict([{"text": "a red thing"}])[0].label in ("red", "green", "blue", "white")


@pytest.mark.usefixtures("plugins")
def test_the_strategy_that_is_off_changes_nothing(tmp_path: Path) -> None:
    name = NAMES["fusionzoo"]
    assert BALANCE[name].family == "loss"
    flags = ["--data", "interactions", "--data.samples", "60", "--train.epochs", "1"]
    flags += ["--log", "none", "--fusion", "mean"]
    off = ["--balance", name, f"--balance_settings.{name}.end", "0"]
    weights = []
    for number, more in enumerate(([], off, off[:2])):
        out = tmp_path / str(number)
        assert train([*flags, *more, "--out", str(out)]) == 0
        state = torch.load(out / "checkpoints" / "last.pt", weights_only=True)
        weights.append(state["objective"])
    same = [all(torch.equal(x, other[key]) for key, x in weights[0].items()) for other in weights]
    assert same == [True, True, False]


def test_the_reader_opens_files_of_its_ending(plugins: str, tmp_path: Path) -> None:
    path = tmp_path / "my.feather"
    frame = pd.DataFrame(
        {"a": [None, 1.0] * 20, "b": [2.5, 3.0, 4.5, 7.0] * 10, "y": ["no", "yes"] * 20}
    )
    frame.to_feather(path)
    flags = [str(path), "--plugins", plugins, "--target", "y", "--train.epochs", "1"]
    assert train([*flags, "--out", str(tmp_path / "run")]) == 0
    answers = fusionzoo.predict(tmp_path / "run", str(path))
    assert {*answers["label"].to_pylist()} <= {"no", "yes"} and len(answers) == 40


def test_each_file_is_found_in_the_folder_that_its_heading_names(tmp_path: Path) -> None:
    """In a copy of the package; files whose name begins with `_` are not imported."""
    package = tmp_path / "fusionzoo"
    source = Path(fusionzoo.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, code in PLACED.items():
        inside = path.relative_to("fusionzoo") if path.parts[0] == "fusionzoo" else path
        (package / inside).write_text(code)
        (package / inside).with_name("_private.py").write_text("raise ValueError('imported')")
    listed = run_python(f"import sys; sys.path.insert(0, '')\n{LISTED}", cwd=tmp_path)
    assert set(NAMES.values()) <= set(listed.split())


def count_table(path: Path) -> dict[str, object]:
    """Write two vectors whose first numbers determine the rate of a count, 1.6 on average."""
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((2, 150, 3))
    counts = draw.poisson(np.exp(0.5 * a[:, 0] + 0.5 * b[:, 0] + 0.2))
    rows = zip(counts.tolist(), a.tolist(), b.tolist(), strict=True)
    lines = [
        json.dumps({"id": f"s{row}", "target": str(count), "a": x, "b": y})
        for row, (count, x, y) in enumerate(rows)
    ]
    path.write_text("\n".join(lines))
    return {"name": "manifest", "root": str(path), "kinds": {"a": "vector", "b": "vector"}}


@pytest.mark.usefixtures("plugins")
def test_the_objective_keeps_the_contract() -> None:
    suite = SUITES["objective"]()
    results = list(suite.checks.run(suite.load("poisson", {})))
    assert len(results) == len(suite.checks) == 10
    assert [(name, problem) for name, problem in results if problem] == []


def test_the_objective_trains_and_its_model_needs_the_plugin(
    plugins: str,
    tmp_path: Path,
    forget_plugins: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = count_table(tmp_path / "data.jsonl")
    flags = ["--plugins", plugins, "--objective.name", "poisson", "--data.name", "manifest"]
    flags += ["--data.root", str(data["root"]), "--data.kinds.a", "vector"]
    flags += ["--data.kinds.b", "vector", "--fusion", "sum", "--fusion.dim", "8"]
    flags += ["--optim.lr", "0.02", "--train.epochs", "12", "--log", "none"]
    assert train([*flags, "--out", str(tmp_path / "run")]) == 0
    assert "deviance" in capsys.readouterr().out
    model = fusionzoo.load(tmp_path / "run")
    low, high = model.predict([{"a": [x, 0, 0], "b": [x, 0, 0]} for x in (-1.5, 1.5)])
    assert 0 < low < 1 < high  # expected counts; 0.3 and 5.5 are right
    forget_plugins()
    with pytest.raises(fusionzoo.FusionZooError, match=r"'count' is no kind.*plugins=.*poisson.py"):
        fusionzoo.load(tmp_path / "run")


@pytest.mark.slow
def test_the_objective_is_benchmarked(plugins: str, tmp_path: Path) -> None:
    tree = {
        "plugins": plugins,
        "data": count_table(tmp_path / "data.jsonl"),
        "encoders": {name: {"name": "vector/identity"} for name in "ab"},
        "objective": {"name": "poisson"},
        "fusions": "sum",
        "fusion": {"dim": 8},
        "folds": 3,
        "seeds": 1,
        "tune": 0,
        "epochs": 12,
        "batch_size": 16,
        "optim": {"lr": 2e-2},
        "corruptions": False,
        "jobs": 1,
        "out": str(tmp_path / "out"),
    }
    report = api.run(from_tree(BenchmarkConfig, tree))
    assert report.failed == {}
    assert report.figures["metric"] == "deviance"  # its own
    error = {line["candidate"]: line["deviance"] for line in report.figures["leaderboard"]}
    assert error["sum"] < error["alone:a"] < error["frequencies of the labels"]
    assert error["ridge regression on everything"] < error["frequencies of the labels"]


def opened(plugins: str, out: Path) -> Bench:
    """Open a benchmark of the digits, with every corruption."""
    tree = {
        "plugins": plugins,
        "data": {"name": "digits", "samples": 90},
        "fusions": "mean",
        "folds": 3,
        "corruptions": "full",
        "out": str(out),
    }
    return open_bench(from_tree(BenchmarkConfig, tree))[0]


def test_the_metric_is_logged_and_a_column_of_the_final_table(
    plugins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", "interactions", "--data.samples", "60", "--fusion", "mean"]
    flags += ["--train.epochs", "1", "--log", "none", "--plugins", plugins]
    assert train([*flags, "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (epoch,) = [line for line in lines if "val" in line]
    results = json.loads((tmp_path / "metrics.json").read_text())
    for figures in (epoch["val"], results["test"], *results["unimodal"].values()):
        assert "balanced_accuracy" in figures
    header, rows = results["table"]["header"], results["table"]["rows"]
    assert header == ["", "accuracy", "macro F1", "AUROC", "balanced accuracy"]
    fused = next(row for row in rows if row[0] == "fusion: mean")
    assert fused[4] == f"{results['test']['balanced_accuracy']:.3f}"
    assert "balanced accuracy" in capsys.readouterr().out


def test_a_benchmark_has_the_metric_and_its_jobs_depend_on_the_metric_s_file(
    plugins: str, tmp_path: Path, forget_plugins: Callable[[], None]
) -> None:
    bench = opened(plugins, tmp_path)
    job = Job("mean", 0, (0,), False, {}, {})
    before = schedule._plugin_code(bench, job)
    logits, target = torch.eye(3).repeat(2, 1), torch.tensor([0, 1, 1, 0, 1, 1])
    _, row = scored(tasks_of(bench, torch.arange(90)), logits, target, None)
    assert row["balanced_accuracy"] == pytest.approx((1 + 0.5) / 2)
    file = next(x for x in map(Path, plugins.split(",")) if x.stem == "balanced_accuracy")
    forget_plugins()
    file.write_text(file.read_text() + "\n# changed\n")
    load_plugins(plugins)
    assert schedule._plugin_code(bench, job) != before


def test_the_corruption_is_tried_by_a_benchmark(plugins: str, tmp_path: Path) -> None:
    image = torch.arange(256, dtype=torch.uint8).expand(3, 2, 256)
    damaged = [corrupt(image, "image", "posterise", severity) for severity in SEVERITIES]
    assert [len(x.unique()) for x in damaged] == [16, 8, 4, 3, 2]
    assert {x for x in conditions(opened(plugins, tmp_path)) if x[1] == "posterise"} == {
        ("image", "posterise", severity) for severity in SEVERITIES
    }


def test_a_corruption_whose_file_changes_is_another_entry_of_the_cache(
    plugins: str, tmp_path: Path, forget_plugins: Callable[[], None]
) -> None:
    def entries() -> list[dict[str, Any]]:
        bench, rows = opened(plugins, tmp_path), torch.arange(3)
        both = (("image", "blur", 1), ("image", "posterise", 1))
        return [_entry(bench, {}, "", rows, condition).description for condition in both]

    blurred, posterised = entries()
    file = next(path for path in map(Path, plugins.split(",")) if path.stem == "posterise")
    forget_plugins()
    file.write_text(file.read_text().replace("16, 32,", "8, 32,"))
    load_plugins(plugins)
    again = entries()
    assert again[0] == blurred == {"samples": "", "corruption": ("blur", 1)}
    assert again[1] != posterised
