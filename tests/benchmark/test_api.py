"""`fusionzoo.benchmark` runs what the command line runs, on data of every form."""

from __future__ import annotations

import re
import subprocess
import sys
import webbrowser
from html import escape as html_escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo.benchmark import api
from fusionzoo.benchmark.bench import dataset_settings
from fusionzoo.benchmark.report.page import Report
from fusionzoo.config import BenchmarkConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.in_memory import store_table
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError, as_keywords
from fusionzoo.scripts.benchmark import main
from helpers.python import run_python

GUIDE = Path(fz.__file__).parents[1] / "docs" / "benchmark.md"
DATA: dict[str, Any] = {"task": "and", "samples": 200, "noise": 1.0}
SETTINGS: dict[str, Any] = {
    "encoders": {name: "vector/identity" for name in "ab"},
    "fusions": ["sum", "gmu"],
    "fusion": {"dim": 16},
    "baselines": "alone,linear",
    "seeds": 1,
    "epochs": 2,
    "tune": 2,
    "optim": {"lr": 3e-3},
    "jobs": 1,
}


def dataset(**changes: Any) -> PairedDataset:
    return fz.create_dataset("interactions", **{**DATA, **changes})


def frame(data: PairedDataset) -> pd.DataFrame:
    columns = {"id": data.ids, "split": data.split_names, "target": data.labels}
    vectors = {name: [x.numpy() for x in data.references(name)] for name in data.modalities}
    return pd.DataFrame({**columns, **vectors})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSIONZOO_CACHE", str(out / "cache"))
        return fz.benchmark({"name": "interactions", **DATA}, out=out, **SETTINGS)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[BenchmarkConfig]:
    """The configurations that `fz.benchmark` would run."""
    configs: list[BenchmarkConfig] = []
    monkeypatch.setattr(api, "run", lambda cfg, data: configs.append(cfg))
    return configs


# ---- data


@pytest.mark.parametrize("form", ["data set", "table"])
def test_data_in_memory_gives_the_same_leaderboard_as_its_name(
    form: str, report: Report, tmp_path: Path
) -> None:
    data: Any = dataset()
    if form == "table":
        kinds = dict.fromkeys(data.modalities, "vector")
        data = {"name": "manifest", "root": frame(data), "kinds": kinds}
    other = fz.benchmark(data, out=tmp_path, **SETTINGS)
    assert len(other.figures["leaderboard"]) == 12
    pd.testing.assert_frame_equal(other.leaderboard, report.leaderboard)


def test_end_to_end_training_uses_the_data_set_in_memory(tmp_path: Path) -> None:
    changes = {"mode": "finetune", "corruptions": False, "controls": False, "fusions": "sum"}
    first = fz.benchmark(dataset(), out=tmp_path / "a", **{**SETTINGS, **changes})
    data = {"name": "interactions", **DATA}
    second = fz.benchmark(data, out=tmp_path / "b", **{**SETTINGS, **changes})
    pd.testing.assert_frame_equal(first.leaderboard, second.leaderboard)


def test_a_name_a_path_and_a_folder_are_recognised(
    tmp_path: Path, resolved: list[BenchmarkConfig]
) -> None:
    table = tmp_path / "my.csv"
    for data in ("digits", str(table), table, str(tmp_path), tmp_path, {"name": "mfeat"}):
        fz.benchmark(data)
    manifest, folders = ({"name": n} for n in ("manifest", "folders"))
    assert [cfg.data for cfg in resolved] == [
        {"name": "digits"},
        {**manifest, "root": str(table)},
        {**manifest, "root": str(table)},
        {**folders, "root": str(tmp_path)},
        {**folders, "root": str(tmp_path)},
        {"name": "mfeat"},
    ]


def test_data_of_another_type_is_an_error() -> None:
    with pytest.raises(FusionZooError, match="data is of type ndarray, and no name"):
        DataSpec.of(np.zeros((2, 2)))


def test_a_stored_table_keeps_its_values_and_paths_become_absolute(tmp_path: Path) -> None:
    columns = {"Photo": ["a.png", None], "text": ["a.png", "b"], "clip": ["/x.wav", "y.wav"]}
    settings = {"name": "manifest", "columns": {"image": "Photo"}, "kinds": {"clip": "audio"}}
    stored = store_table({**settings, "root": pd.DataFrame(columns)}, tmp_path)
    assert stored == {**settings, "root": stored["root"], "allow_outside": True}
    rows = pq.read_table(stored["root"]).to_pylist()
    here = Path.cwd()
    assert rows[0] == {"Photo": str(here / "a.png"), "text": "a.png", "clip": "/x.wav"}
    assert rows[1] == {"Photo": None, "text": "b", "clip": str(here / "y.wav")}
    assert store_table({**settings, "root": pd.DataFrame(columns)}, tmp_path) == stored
    changed = {**columns, "text": ["a.png", "c"]}
    other = store_table({**settings, "root": pa.table(changed)}, tmp_path)
    assert other["root"] != stored["root"]


def test_data_sets_in_memory_are_told_apart_by_values_labels_and_splits() -> None:
    data = dataset()
    assert dataset_settings(data) == dataset_settings(dataset())
    others = [dataset(noise=0.9), dataset(flip=0.5), data.subset(range(100)), data.select("a")]
    assert len({dataset_settings(other)["in_memory"] for other in [data, *others]}) == 5


# ---- settings

SMALL = {"data": {"name": "interactions", "samples": 200}}
SMALL_FLAGS = ["--data.name", "interactions", "--data.samples", "200"]


def test_settings_override_those_of_a_recipe_in_every_form(
    tmp_path: Path, resolved: list[BenchmarkConfig]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{data: digits, epochs: 3, optim: {lr: 0.01, clip: 2.0}, seeds: 4}")
    tree = {"data": "digits", "epochs": 3, "optim": {"lr": 0.01, "clip": 2.0}, "seeds": 4}
    for config in (recipe, str(recipe), tree, from_tree(BenchmarkConfig, tree)):
        fz.benchmark(config=config, seeds=2, optim={"lr": 0.1}, out=tmp_path)
    changes = {"seeds": 2, "optim": {"lr": 0.1, "clip": 2.0}, "out": str(tmp_path)}
    assert resolved == [from_tree(BenchmarkConfig, {**tree, **changes})] * 4


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"fusoins": ["gmu"]}, ["--fusoins", "gmu"]),
        ({"optim": {"lrr": 1.0}}, ["--optim.lrr", "1.0"]),
        ({"epochs": 0}, ["--epochs", "0"]),
        ({"seeds": "many"}, ["--seeds", "many"]),
        ({**SMALL, "fusions": ["gmv"]}, [*SMALL_FLAGS, "--fusions", "gmv"]),
        ({"data": {"name": "digits", "sead": 1}}, ["--data.name", "digits", "--data.sead", "1"]),
        (
            {**SMALL, "settings": {"gmu": {"dropuot": 1}}},
            [*SMALL_FLAGS, "--settings.gmu.dropuot", "1"],
        ),
        ({"folds": 2}, ["--folds", "2"]),
    ],
)
def test_errors_are_those_of_the_command_line(
    settings: dict[str, Any], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--out", str(tmp_path / "out")]) == 2
    with pytest.raises(FusionZooError) as error:
        fz.benchmark(**settings, out=tmp_path / "out")
    assert as_keywords(capsys.readouterr().err) == f"error: {error.value}\n"
    assert not (tmp_path / "out").exists()


def test_ranking_over_reports_is_left_to_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match=r"benchmark\.py --combine"):
        fz.benchmark("digits", combine=["a", "b"], out=tmp_path)


# ---- the report


def test_a_report_has_verdict_leaderboard_and_page(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report.verdict.startswith("Fusion ")
    assert report.failed == {}
    names = {"sum", "gmu", "alone:a", "alone:b", "majority class"}
    assert names < set(report.leaderboard["candidate"])
    assert report.leaderboard["accuracy"].is_monotonic_decreasing
    assert (report.leaderboard["low"] < report.leaderboard["high"]).all()
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    report.open()
    assert opened == [(report.folder / "index.html").as_uri()]


def test_a_report_is_read_again_from_its_folder(report: Report, tmp_path: Path) -> None:
    again = fz.Report.read(report.folder)
    assert again.verdict == report.verdict
    pd.testing.assert_frame_equal(again.leaderboard, report.leaderboard)
    with pytest.raises(FusionZooError, match="holds no finished report"):
        Report.read(tmp_path)


def test_a_notebook_shows_the_verdict_and_the_leaderboard(report: Report) -> None:
    html, markdown = report._repr_html_(), report._repr_markdown_()
    assert report.verdict in markdown
    assert html_escape(report.verdict.partition("`")[0], quote=False) in html
    assert "<code>" in html
    for line in report.figures["leaderboard"]:
        assert f"<td>{line['candidate']}</td>" in html
        assert line["candidate"] in markdown
        assert f"{line['accuracy']:.3f}" in html
    assert str(report.folder / "index.html") in html


def test_without_pandas_the_leaderboard_is_one_clear_error(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FusionZooError, match="pip install pandas"):
        _ = report.leaderboard


# ---- the guide


BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_guide_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BLOCKS[number], names)
    assert names["report"].verdict.startswith("Fusion ")
    assert not names["report"].failed


# ---- the package is a function


@pytest.mark.parametrize("submodule", [None, "fusionzoo.benchmark.bench"])
def test_the_package_can_be_called_before_and_after_a_module_of_it_is_imported(
    submodule: str | None, tmp_path: Path
) -> None:
    code = (
        "import sys, fusionzoo as fz\n"
        f"{f'import {submodule}' if submodule else 'fz.benchmark'}\n"
        f"print('torch' in sys.modules, callable(fz.benchmark), fz.benchmark.__name__)\n"
        f"try: fz.benchmark('digts', out={str(tmp_path)!r})\n"
        "except fz.FusionZooError as error: print(error)"
    )
    first, second = run_python(code).splitlines()
    assert first == f"{submodule is not None} True fusionzoo.benchmark"
    assert "nor the name of a data set. Did you mean 'digits'?" in second


@pytest.mark.slow
def test_two_processes_train_on_a_data_set_in_memory_as_one_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, fusionzoo as fz\n"
        "if __name__ == '__main__':\n"
        "    torch.set_num_threads(1)\n"
        f"    data = fz.create_dataset('interactions', **{DATA!r})\n"
        "    for jobs in (1, 2):\n"
        f"        settings = {SETTINGS!r} | {{'jobs': jobs, 'mode': sys.argv[1]}}\n"
        "        settings |= {'folds': int(sys.argv[2]), 'tune': int(sys.argv[3])}\n"
        "        fz.benchmark(data, out=f'{sys.argv[1]}-{jobs}', **settings)\n"
    )
    for mode, folds, trials in (("probe", "3", "2"), ("finetune", "3", "0")):
        command = [sys.executable, "-P", str(script), mode, folds, trials]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
        tables = [(tmp_path / f"{mode}-{jobs}" / "table.md").read_text() for jobs in (1, 2)]
        assert tables[0] == tables[1]


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_one_clear_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    settings = {**SETTINGS, "jobs": 2}
    script.write_text(
        "import fusionzoo as fz\n"
        f"fz.benchmark('interactions', out={str(tmp_path / 'out')!r}, **{settings!r})\n"
    )
    command = [sys.executable, "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "FusionZooError: " in line]
    assert len(errors) >= 2  # of the workers and of the script
    assert all('under `if __name__ == "__main__":`' in line for line in errors)
