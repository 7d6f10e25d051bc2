"""What the README and the pages of the docs say is so: commands, examples and figures."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from fusionzoo import create_dataset, list_datasets, list_fusions
from fusionzoo.cli import EVALUATE, main
from fusionzoo.config import (
    BenchmarkConfig,
    EmbedConfig,
    EvaluateConfig,
    PredictConfig,
    RunConfig,
    from_args,
)
from fusionzoo.datasets.summary import data_summary
from fusionzoo.tools.search.search import SearchConfig
from fusionzoo.training.balance import BALANCE
from fusionzoo.zoo.cards import FAMILIES
from helpers.python import run_python

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {  # distributed.md has a test of its own
    path.name: path.read_text().replace("\\\n", " ")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if path.name != "distributed.md"
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MINUTES = ("training.ipynb", "benchmark.ipynb", "embeddings.ipynb")  # `make nightly` runs these
SHORTER = {  # what tests run instead: other tests train with every strategy
    "training.ipynb": {
        "agm cca_loss contrastive_align gblend mla mmpareto modality_dropout ogm_ge pmr": "agm mla"
    }
}


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def python_block(text: str, page: str) -> str:
    """Return the Python block of a page that contains a text."""
    return next(block for block in blocks("python", page) if text in block)


def commands(script: str) -> list[list[str]]:
    """Return the flags of each command in the README and the docs."""
    lines = [line for page in PAGES for x in blocks("bash", page) for line in x.splitlines()]
    lines += re.findall(r"`([^`\n]*\.py [^`\n]*)`", "".join(PAGES.values()))
    found = [shlex.split(line, comments=True) for line in lines]
    flags = [words[words.index(script) + 1 :] for words in found if script in words]
    return [words for words in flags if "..." not in words]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1000


def test_the_numbers_of_components_are_right() -> None:
    assert f"{len(list_fusions())} early, late, attention and hybrid fusions" in README
    assert f"{len(BALANCE)}\ntraining strategies" in README
    changes = (ROOT / "CHANGELOG.md").read_text().replace("\n", " ")
    assert f"{len(list_fusions())} fusions" in changes
    assert f"{len(BALANCE)} strategies" in changes
    for family in FAMILIES:
        assert f"{family} ({len(list_fusions(family))})" in changes
    assert f"one of {len(list_fusions())}<" in (ROOT / "docs" / "model.svg").read_text()


def test_the_pictures_are_small() -> None:
    assert (ROOT / "docs" / "model.svg").stat().st_size < 60_000
    assert (ROOT / "docs" / "report.webp").stat().st_size < 150_000


@pytest.mark.parametrize("flags", commands("train.py"), ids=" ".join)
def test_every_training_command_is_understood(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if flags not in (["--help"], ["--help-all"]) and "--resume" not in flags:
        changed = from_args(RunConfig, flags, ["data"]) != from_args(RunConfig, [])
        assert changed == bool(flags), "its flags change no setting"


@pytest.mark.parametrize("flags", commands("embed.py"), ids=" ".join)
def test_every_embedding_command_is_understood(flags: list[str]) -> None:
    cfg = from_args(EmbedConfig, flags, EVALUATE.words)
    named = "--model" in flags or not flags[0].startswith("-")
    assert bool(cfg.model) == (named and not (cfg.encoders or cfg.fusion))


@pytest.mark.parametrize(
    ("command", "cls"), [("evaluate", EvaluateConfig), ("predict", PredictConfig)]
)
def test_every_command_for_a_finished_model_is_understood(
    command: str, cls: type[EvaluateConfig] | type[PredictConfig]
) -> None:
    for flags in commands(command):
        cfg = from_args(cls, flags, EVALUATE.words)
        assert cfg.model
        assert cfg.data.get("name", "digits") in [*list_datasets(), "my.csv", "new.csv"]
    assert commands(command)


@pytest.mark.parametrize("flags", commands("search"), ids=" ".join)
def test_every_search_command_is_understood(flags: list[str]) -> None:
    cfg = from_args(SearchConfig, [f"--embeddings={flags[0]}", *flags[1:]])
    assert cfg.embeddings == flags[0]
    assert cfg.text or cfg.image or cfg.audio or cfg.id


def test_the_figures_of_the_search_example_are_the_ones_in_results() -> None:
    with (ROOT / "results" / "retrieval.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["right"] == "pair"]
    found = {(row["vectors"], row["query"], row["answers"]): row for row in rows}
    for query in ("text", "audio"):
        row = found["trained", query, "image"]
        mean, low, high = (
            round(100 * float(row[f"recall@10{end}"])) for end in ("", "_low", "_high")
        )
        assert f"in {mean} %" in PAGES["search.md"]
        assert f"({low} to {high})" in PAGES["search.md"]
    chance = float(found["chance", "text", "image"]["recall@10"])
    assert f"by chance in {100 * chance:.0f} %" in PAGES["search.md"]


@pytest.mark.parametrize("flags", commands("benchmark.py"), ids=" ".join)
def test_every_benchmark_command_is_understood(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert from_args(BenchmarkConfig, flags, ["data"]).data["name"] in list_datasets()


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("configs/benchmarks/*.yaml")), ids=lambda p: p.stem
)
def test_every_benchmark_recipe_is_read(path: Path) -> None:
    cfg = from_args(BenchmarkConfig, ["--config", str(path)])
    assert cfg.data["name"] == path.stem.partition("_")[0]  # stamps_whisper: other encoders


def test_the_verdict_is_the_one_in_results() -> None:
    measured = (ROOT / "results" / "benchmark" / "stamps_seven" / "table.md").read_text()
    [verdict] = re.findall(r"^> (.*) \[\.\.\.\]$", PAGES["benchmark.md"], flags=re.MULTILINE)
    assert measured.startswith(verdict)
    shown = re.search(r"gains (\S+) points \((.*?)\) .*, and (\S+) \((.*?)\) over ", README)
    assert shown
    gain, interval, difference, its_interval = shown.groups()
    assert f"+{gain} points (95 % interval {interval}) over text alone" in measured
    assert f"{difference} points (95 % interval {its_interval})" in measured


@pytest.mark.slow
def test_the_python_example_prints_what_it_says() -> None:
    code = python_block("fz.create_model", "train.md")
    wanted = re.findall(r"^# (.*)$", code, flags=re.MULTILINE)
    assert run_python(code).strip().splitlines() == wanted


@pytest.mark.slow
def test_the_python_api_does_what_the_example_says(tmp_path: Path) -> None:
    run_python(python_block("fz.train(", "README.md"), cwd=tmp_path)
    header = (tmp_path / "predictions.csv").read_text().splitlines()[0]
    assert header.startswith('"id","label","p_')
    assert '"present_' in header
    assert (tmp_path / "embeddings.parquet").is_file()
    assert (tmp_path / "runs" / "a" / "metrics.json").is_file()


@pytest.mark.slow
def test_the_first_ten_minutes_go_as_the_start_page_says(tmp_path: Path) -> None:
    """Every command of start.md in a fresh folder, then the program of deploy.md on its model."""
    for script in ("train.py", "embed.py"):
        shutil.copy(ROOT / script, tmp_path)
    [code] = blocks("python", "start.md")
    run_python(code, cwd=tmp_path)
    lines = [line for block in blocks("bash", "start.md") for line in block.splitlines()]
    assert [line.split()[0] for line in lines] == [*("python", "fusionzoo") * 2, "python"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    tables = []
    for line in lines:
        env = {**os.environ, "PATH": path}
        said = subprocess.check_output(shlex.split(line), cwd=tmp_path, env=env, text=True)
        tables += re.findall(r"Test split.*?┘", said, flags=re.DOTALL)
    assert [without_figures(x) for x in tables] == [
        without_figures(x)
        for page in ("README.md", "start.md")
        for x in re.findall(r"Test split.*?┘", PAGES[page], flags=re.DOTALL)
    ]
    assert (tmp_path / "predictions.csv").is_file()
    assert (tmp_path / "mine.parquet").is_file()
    program = python_block("fz.load(", "deploy.md")
    assert len(run_python(program, cwd=tmp_path).splitlines()) == 2


def without_figures(table: str) -> list[str]:
    """Return the first column of a table, the name of the best modality left out."""
    cells = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    return [re.sub(r"^gain over .*", "gain", cell) for cell in cells]


def test_the_example_of_data_in_memory_runs(tmp_path: Path) -> None:
    code = python_block("dataset.to_manifest(", "data.md")
    again = "print(fz.create_dataset('rows.parquet'))"
    lines = run_python(f"{code}\n{again}", cwd=tmp_path).splitlines()
    assert lines[0].startswith("PairedDataset the list: 60 samples")
    assert lines[1:3] == lines[5:7] == ["  have    text 60, photo (image) 60", lines[2]]


def test_the_manifest_example_is_read(tmp_path: Path) -> None:
    text = blocks("csv", "data.md")[0]
    (tmp_path / "my.csv").write_text(text)
    for name in re.findall(r"photos/[^,\n]+|clips/[^,\n]+", text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.parent.name == "photos":
            Image.new("RGB", (8, 8)).save(path)
        else:
            soundfile.write(path, np.zeros(4000), 16000)
    data = create_dataset("manifest", root=str(tmp_path / "my.csv"))
    assert data.splits == {"train": 2, "val": 1, "test": 1}
    wanted = [[True] * 3, [True, False, True], [False, True, False], [True] * 3]
    assert data.present.tolist() == wanted
    assert all(data[i] is not None for i in range(4))
    shown = next(text for text in blocks("text", "data.md") if text.startswith("data "))
    assert data_summary(data)[1:] == shown.splitlines()[1:]


@pytest.mark.usefixtures("forget_plugins")
def test_the_fusion_that_it_adds_keeps_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "product.py"
    path.write_text(python_block("class Product", "plugins.md"))
    assert main(["zoo", "check", "product", "--plugins", str(path)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_with_its_outputs(path: Path) -> None:
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert any("image/png" in out.get("data", {}) for c in cells for out in c["outputs"])
    assert not [out for c in cells for out in c["outputs"] if out["output_type"] == "error"]
    assert all(cell["execution_count"] for cell in cells)


@pytest.mark.needs("nbclient")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(x, marks=getattr(pytest.mark, "nightly" if x.name in MINUTES else "slow"))
        for x in NOTEBOOKS
    ],
    ids=lambda path: path.name,
)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    for long, short in SHORTER.get(path.name, {}).items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    (tmp_path / path.name).write_text(text)
    code = (
        "import sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], 4)\n"
        "client = nbclient.NotebookClient(book, timeout=600, kernel_name='python3')\n"
        "client.execute(cwd=sys.argv[2])"
    )
    run_python(code, str(tmp_path / path.name), str(path.parent))
