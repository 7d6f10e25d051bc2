"""The console commands: what they import, what they print, and how they end."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fusionzoo.cli import COMMANDS, EVALUATE, PREDICT, main
from fusionzoo.config import BenchmarkConfig, EmbedConfig, EvaluateConfig, PredictConfig, RunConfig
from fusionzoo.config.load import Usage, from_args
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.errors import FusionZooError
from fusionzoo.files import make_cache_folder
from fusionzoo.ground.console import command_line, print_columns
from fusionzoo.scripts import benchmark, embed, train
from fusionzoo.tools import analyse, reproduce
from fusionzoo.tools.run_report import report
from helpers.python import run_python

pytestmark = pytest.mark.usefixtures("own_cache")
ROOT = Path(__file__).parents[1]
LOADED = "import sys; print([m for m in {!r} if m in sys.modules])"


@pytest.mark.parametrize(
    "command", [["zoo"], ["zoo", "list", "m*"], ["zoo", "info", "gmu"], ["zoo", "info", "hf/x"]]
)
def test_the_zoo_is_shown_without_torch(command: list[str]) -> None:
    heavy = ("torch", "numpy", "pydantic", "timm", "transformers")
    code = f"from fusionzoo.cli import main; main({command!r}); {LOADED.format(heavy)}"
    assert run_python(code).endswith("[]\n")


def test_training_imports_fsdp_only_to_share_out_weights() -> None:
    absent = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sklearn")
    code = (
        "import fusionzoo.training.build, fusionzoo.training.fit, fusionzoo.training.trainer\n"
        "from fusionzoo import create_dataset; create_dataset('digits')\n" + LOADED.format(absent)
    )
    assert run_python(code).endswith("[]\n")


@pytest.mark.slow
def test_timm_does_not_bring_wandb() -> None:
    code = (
        "from fusionzoo.encoders import create_encoder\n"
        "create_encoder('image', 'timm/resnet10t', pretrained=False)\n" + LOADED.format(("wandb",))
    )
    assert run_python(code).endswith("[]\n")


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    from fusionzoo.datasets.builtin.digits import read_digits

    images, target = read_digits()
    theirs = load_digits()
    assert np.array_equal(images, theirs.images) and np.array_equal(target, theirs.target)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("timm/resnet18", ["timm/*  (image encoder)", "--encoders.image.augment", "freeze"]),
        ("mel/resnet10t", ["--encoders.audio.num_mels", "default 64"]),
        ("mel/stats", ["mel/stats  (audio encoder)", "--encoders.audio.longest"]),
        ("chars", ["--encoders.text.max_length", "default 256"]),
        ("hf/some-model", ["hf/*  (text encoder)", "hf/*  (audio encoder)"]),
        ("ogm_ge", ["--balance_settings.ogm_ge.alpha", "strength of the damping"]),
        ("gmu", ["--fusion.gate", "default 'softmax'  normalisation of the gates"]),
    ],
)
def test_zoo_info_shows_the_settings_of_every_component(
    name: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["zoo", "info", name]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in shown)
    assert ("mel/*" in out) == (name == "mel/resnet10t")


@pytest.mark.parametrize(
    ("pattern", "shown", "hidden"),
    [
        ("mm*", ["3 fusions", "mmtm", "1 training strategies", "mmpareto"], ["gmu", "Encoders"]),
        ("late", ["14 fusions", "qmf"], ["gmu", "training strategies", "Encoders"]),
        ("audio", ["Encoders", "mel/stats"], ["fusions", "tabular"]),
        ("timm/vit_tiny_*", ["timm/vit_tiny_patch16_224\n"], ["fusions", "Encoders", "swin"]),
    ],
)
def test_zoo_list_shows_what_matches(
    pattern: str, shown: list[str], hidden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["zoo", "list", pattern]) == 0
    out = capsys.readouterr().out
    assert [words for words in shown if words not in out] == []
    assert [words for words in hidden if words in out] == []


def test_a_pattern_or_name_that_matches_nothing_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, noun in (("zoo", "fusion, training strategy or encoder"), ("data", "data set")):
        assert main([command, "list", "q9*"]) == 2
        expected = f"error: no {noun} matches 'q9*'; `fusionzoo {command} list` lists all\n"
        assert capsys.readouterr() == ("", expected)
    assert main(["zoo", "info", "gmv"]) == 2
    assert "Did you mean 'gmu'?" in capsys.readouterr().err


def test_version_and_module_are_ways_in() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusionzoo", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fusionzoo 0.1.0\n"


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "fusionzoo", "train", "--help"],
        ["-m", "fusionzoo", "embed", "--help"],
        ["-m", "fusionzoo", "benchmark", "--help"],
        ["-m", "fusionzoo", "--help"],
        [str(ROOT / "train.py"), "--help"],
    ],
)
def test_a_reader_that_goes_away_ends_a_command_quietly(command: list[str]) -> None:
    """As `| head` does: the reading end is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("train.py", "python embed.py"),
        ("../zoo/train.py", "python ../zoo/embed.py"),
        ("/usr/bin/fusionzoo", "fusionzoo embed"),
        ("/lib/fusionzoo/__main__.py", "python -m fusionzoo embed"),
        ("/lib/fusionzoo/scripts/train.py", "fusionzoo embed"),
        ("my_script.py", "fusionzoo embed"),
        ("/lib/ipykernel_launcher.py", "fusionzoo embed"),
    ],
)
def test_the_next_command_is_written_as_this_one_was_started(
    started: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [started])
    assert command_line("embed") == expected


def test_a_cache_that_may_not_be_written_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FusionZooError) as caught:
        make_cache_folder(tmp_path / "weights")
    assert "permission denied" in str(caught.value) and "FUSIONZOO_CACHE" in str(caught.value)
    assert "make room" not in str(caught.value)


def test_help_of_training_names_the_command_that_lists_component_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    assert "fusionzoo zoo info NAME" in capsys.readouterr().out


def test_columns_are_aligned_and_the_last_wraps_below_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_columns([("--a", "1", "one two"), ("--long", "22", "three")], width=19)
    assert capsys.readouterr().out == "  --a     1   one\n        two\n  --long  22  three\n"
    print_columns([("--a", "1", "first second third")], width=60)
    assert capsys.readouterr().out == "  --a  1  first second third\n"
    print_columns([])
    assert capsys.readouterr().out == ""


def test_the_program_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert [words[0] for words in COMMANDS if f"    {words[0]}" not in shown] == []


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


USAGES = (
    *((train.USAGE, RunConfig), (embed.USAGE, EmbedConfig), (benchmark.USAGE, BenchmarkConfig)),
    *((EVALUATE, EvaluateConfig), (PREDICT, PredictConfig), (analyse.USAGE, analyse.AnalyseConfig)),
    *((report.USAGE, report.ReportConfig), (reproduce.USAGE, reproduce.ReproduceConfig)),
)


@pytest.mark.parametrize(
    ("usage", "cls", "example"),
    [(usage, cls, x) for usage, cls in USAGES for x in usage.examples if "--resume" not in x],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_examples_of_help_are_understood(usage: Usage, cls: type, example: str) -> None:
    changed = from_args(cls, shlex.split(example), usage.words) != cls()
    assert changed == bool(example)


def test_reports_to_combine_are_words_or_a_list() -> None:
    for flags in (["--combine", "a, b"], ["--combine", "[a, b]"]):
        assert word_list(from_args(BenchmarkConfig, flags).combine) == ["a", "b"]
