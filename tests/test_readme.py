"""What the README says is so."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from fusionzoo import create_dataset, list_datasets, list_encoders, list_fusions
from fusionzoo.config import BenchmarkConfig, EmbedConfig, RunConfig, from_args
from fusionzoo.datasets.summary import data_summary

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(script: str) -> list[list[str]]:
    lines = "\n".join(blocks("bash")).splitlines() + re.findall(r"`([^`\n]*\.py [^`\n]*)`", README)
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index(script) + 1 :] for words in found if script in words]


@pytest.mark.parametrize("flags", commands("train.py"), ids=" ".join)
def test_every_training_command_is_understood(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if flags not in (["--help"],) and "--resume" not in flags:
        from_args(RunConfig, flags)


@pytest.mark.parametrize("flags", commands("embed.py"), ids=" ".join)
def test_every_embedding_command_is_understood(flags: list[str]) -> None:
    assert from_args(EmbedConfig, flags).model


@pytest.mark.parametrize("flags", commands("benchmark.py"), ids=" ".join)
def test_every_benchmark_command_is_understood(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert from_args(BenchmarkConfig, flags).data["name"] in list_datasets()


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("configs/benchmarks/*.yaml")), ids=lambda p: p.stem
)
def test_every_benchmark_recipe_is_read(path: Path) -> None:
    cfg = from_args(BenchmarkConfig, ["--config", str(path)])
    assert cfg.data["name"] == path.stem


def test_the_leaderboard_is_the_one_in_results() -> None:
    measured = (ROOT / "results" / "benchmark" / "stamps" / "table.md").read_text()
    assert f"> {measured.splitlines()[0]}\n" in README
    shown = re.findall(r"^\| .* \| (?:late|single|baseline|early|attention) \| .*$", README, re.M)
    assert len(shown) > 10
    assert all(f"{line}\n" in measured for line in shown)


def test_the_table_names_all_that_is_in_the_zoo() -> None:
    for name in [*list_fusions(), *list_datasets(), *list_encoders()]:
        assert f"`{name.replace('*', '<')}" in README.replace("<any", "<").replace(
            "<bundle", "<"
        ), name


def test_the_python_example_prints_what_it_says() -> None:
    code = blocks("python")[0]
    wanted = re.findall(r"^# (.*)$", code, flags=re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip().splitlines() == wanted


def test_the_manifest_example_is_read(tmp_path: Path) -> None:
    text = blocks("csv")[0]
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
    shown = next(text for text in blocks("text") if text.startswith("data "))
    assert data_summary(data)[1:] == shown.splitlines()[1:]


def test_the_fusion_that_it_adds_keeps_the_contract() -> None:
    source = blocks("python")[1]
    code = (
        "import sys, types; from fusionzoo.zoo.conformance import runner\n"
        "name = 'fusionzoo.fusion.early.product'\n"
        "module = types.ModuleType(name); module.__package__ = 'fusionzoo.fusion.early'\n"
        "sys.modules[name] = module\n"
        f"exec({source!r}, vars(module))\n"
        "sys.exit(runner.main_check('product'))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_with_its_outputs(path: Path) -> None:
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert any("image/png" in out.get("data", {}) for c in cells for out in c["outputs"])
    assert not [out for c in cells for out in c["outputs"] if out["output_type"] == "error"]
    assert all(cell["execution_count"] for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(path: Path) -> None:
    code = (
        "import sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], 4)\n"
        "client = nbclient.NotebookClient(book, timeout=600, kernel_name='python3')\n"
        "client.execute(cwd=sys.argv[2])"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(path), str(path.parent)], check=True)
