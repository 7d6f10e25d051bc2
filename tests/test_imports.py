"""What a command may have imported: each of these costs 0.1 to 3 seconds of CPU at every start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.python import run_python

HEAVY = (
    *("pandas", "scipy", "sklearn", "matplotlib", "tensorboard", "PIL", "jinja2", "optuna"),
    *("transformers", "timm", "torchvision", "torchaudio", "datasets"),
)
# Commands run as the console command does; what is imported is noted when the first line appears,
# before the first step, and at the end.
CODE = """
import json, sys
from pathlib import Path
from fusionzoo import __main__ as command

out, heavy, args = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
seen = {}

def note(when):
    seen.setdefault(when, [x for x in heavy if sys.modules.get(x)])
    out.write_text(json.dumps(seen))

class Output:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        if text.strip():
            note("first line")
        return self.stream.write(text)
    def __getattr__(self, name):
        return getattr(self.stream, name)

class Steps:  # a finder that sees fusionzoo's trainer before it is imported
    def find_spec(self, name, path=None, target=None):
        if name == "fusionzoo.training.fit":
            from fusionzoo.training.trainer import Trainer
            step = Trainer.step
            Trainer.step = lambda *given, **more: (note("first step"), step(*given, **more))[1]

sys.stdout = Output(sys.stdout)
sys.meta_path.insert(0, Steps())
sys.argv = ["fusionzoo", *args]
try:
    command.run()
finally:
    note("end")
"""


def imported(folder: Path, *args: str, heavy: tuple[str, ...] = HEAVY) -> dict[str, list[str]]:
    """Run a command; return which of `heavy` it had imported, by moment."""
    noted = folder / "imported.json"
    run_python(CODE, str(noted), json.dumps(heavy), *args, cwd=folder)
    return json.loads(noted.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports")
    rows = [f"{x},{x % 7},{'abc'[x % 3]},{'ny'[x % 7 > 3]}" for x in range(60)]
    (folder / "table.csv").write_text("\n".join(["id,age,city,y", *rows]))
    return folder


@pytest.fixture(scope="module")
def of_training(folder: Path) -> dict[str, list[str]]:
    flags = ["--target", "y", "--train.epochs", "1", "--out", "run"]
    return imported(folder, "train", "table.csv", *flags)


@pytest.mark.parametrize("moment", ["first line", "first step"])
def test_training_on_a_table_imports_little_before(
    moment: str, of_training: dict[str, list[str]]
) -> None:
    assert of_training[moment] == []


def test_predicting_rows_of_a_table_imports_little(
    folder: Path, of_training: dict[str, list[str]]
) -> None:
    heavy = (*HEAVY, "torch._dynamo", "torch._inductor", "sympy")
    flags = ["run", "table.csv", "--out", "x.csv"]
    assert imported(folder, "predict", *flags, heavy=heavy)["end"] == []


def test_pyarrow_knows_pandas_once_anything_else_imports_it() -> None:
    code = """if True:
        import sys
        from fusionzoo.__main__ import PandasLater
        sys.meta_path.insert(0, PandasLater())
        from fusionzoo.targets import words
        import pyarrow as pa
        of_ours = {"__name__": "fusionzoo.anything", "pa": pa}
        exec("pa.array(['a'])", of_ours)  # as fusionzoo calls it
        print("pandas" in sys.modules)
        import importlib.util, pandas
        print(pa.array(pandas.Series(["a", None, float("nan")])).null_count)
    """
    pytest.importorskip("pandas")
    assert run_python(code).split() == ["False", "2"]
