"""Mistakes in a command are one line, exit code 2, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROWS = 40
CELLS = {  # column -> its cell in a row
    "diagnosis": lambda row: ("well", "ill")[row % 2],
    "name": lambda row: f"name {row}",
    "same": lambda row: "yes",
    "nothing": lambda row: "",
}
CODE = """
import sys
from fusionzoo.cli import main
code = main(sys.argv[1:])
heavy = [x for x in ("torch", "timm", "transformers", "torchvision", "scipy") if x in sys.modules]
print("\\n", code, heavy)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [",".join(cell(row) for cell in CELLS.values()) for row in range(ROWS)]
    notes = [f'"note {row} of some words"' for row in range(ROWS)]
    lines = [f"note,{','.join(CELLS)}", *map(",".join, zip(notes, rows, strict=True))]
    (tmp_path / "clinic.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["train", "benchmark"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["clinc.csv", "--target", "diagnosis"], "no file clinc.csv. Did you mean 'clinic.csv'?"),
        (["clinic.csv", "--target", "diagnose"], "Did you mean 'diagnosis'?"),
        (["clinic.csv"], "--target names the column to predict, of note, diagnosis, name,"),
        (["clinic.csv", "--target", "same"], "'same' has a single value"),
        (["clinic.csv", "--target", "nothing"], "'nothing' is empty in all rows"),
        (["clinic.csv", "--target", "name"], "'name' has 40 different values in 40 rows"),
        (["clinic.csv", "--target", "diagnosis", "--data.kinds.nte", "text"], "no column 'nte'"),
        (["clinic.csv", "--taget", "diagnosis"], "Did you mean '--target'?"),
    ],
)
def test_a_mistake_is_one_line_and_answered_without_torch(
    command: str, args: list[str], says: str, folder: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, command, *args],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["2", "[]"], done.stdout
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert [x.name for x in folder.iterdir()] == ["clinic.csv"]
