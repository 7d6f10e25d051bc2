"""Progress is a bar in a terminal, one changing line in a notebook, few lines in a log file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from fusionzoo.ground import progress
from fusionzoo.ground.progress import LogBar, NotebookBar, progress_bar
from helpers.python import run_python


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let a test set the time, in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def work(bar: Any, clock: list[float], steps: int, seconds: float) -> None:
    for _ in range(steps):
        clock[0] += seconds
        bar.update()
        bar.refresh()
    bar.close()


def test_a_log_has_a_line_every_ten_seconds_and_no_bar(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    bar = progress_bar(total=100, unit="step", desc="train")
    assert isinstance(bar, LogBar)
    work(bar, clock, steps=100, seconds=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        *("train: 20 %", "train: 40 %", "train: 60 %", "train: 80 %", "train: 100 %")
    ]
    assert lines[1].startswith("train: 40 % (40 of 100 steps, ")
    assert lines[1].endswith("step/s)")


def test_short_work_leaves_nothing_in_a_log(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    work(progress_bar(total=50, unit="step"), clock, steps=50, seconds=0.1)
    assert list(progress_bar(range(3), unit="row")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_work_of_unknown_length_is_counted(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    work(progress_bar(unit="sample", desc="convert"), clock, steps=25, seconds=1.0)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        *("convert: 10 samples", "convert: 20 samples")
    ]


def test_printing_beside_a_bar_in_a_log_writes_the_line_alone(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar(total=10, unit="step") as bar:
        bar.update()
        tqdm.write("epoch 1")
    assert capsys.readouterr() == ("epoch 1\n", "")


@pytest.mark.needs("IPython")
def test_a_notebook_has_one_line_that_changes_and_goes_with_the_work(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import IPython

    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], **how: bool) -> Handle:
        assert not shown  # one output only
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr("IPython.display.display", display)
    bar = progress_bar(total=20, unit="step")
    assert isinstance(bar, NotebookBar)
    work(bar, clock, steps=20, seconds=0.125)
    shares = [line.partition(" (")[0] for line in shown]
    assert shares == ["20 %", "40 %", "60 %", "80 %", "100 %", ""]
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(total=4, unit="step", desc="train") as bar:
        bar.update(4)
    assert "train: 100%|" in terminal.getvalue()


def test_a_silent_bar_shows_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    work(progress_bar(total=9, unit="step", disable=True), clock, steps=9, seconds=60.0)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.needs("nbclient")
def test_training_in_a_notebook_leaves_no_red_output(tmp_path: Path) -> None:
    code = (
        "import nbformat, nbclient\n"
        'cell = \'import fusionzoo as fz; fz.train({"name": "digits", "samples": 300},\''
        ' \' fusion="gmu", epochs=2, log="none", out="run")\'\n'
        "book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])\n"
        "nbclient.NotebookClient(book, timeout=600, kernel_name='python3').execute()\n"
        "outputs = book.cells[0].outputs\n"
        "print(sum(o.get('name') == 'stderr' for o in outputs))\n"
    )
    assert run_python(code, cwd=tmp_path) == "0\n"
