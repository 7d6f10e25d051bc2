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
COMPILER = ("torch._dynamo", "torch._inductor")
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
    return imported(folder, "train", "table.csv", *flags, heavy=(*HEAVY, *COMPILER, "sympy"))


@pytest.mark.parametrize("moment", ["first line", "first step"])
def test_training_on_a_table_imports_little_before(
    moment: str, of_training: dict[str, list[str]]
) -> None:
    assert of_training[moment] == []


@pytest.mark.parametrize(
    "args",
    [
        ("predict", "run", "table.csv", "--out", "x.csv"),
        ("embed", "run", "table.csv", "--out", "x.npy"),
        ("evaluate", "run"),  # whose intervals need scipy.special
    ],
    ids=lambda args: args[0],
)
def test_answering_rows_of_a_table_imports_little(
    args: tuple[str, ...], folder: Path, of_training: dict[str, list[str]]
) -> None:
    absent = {*HEAVY, *COMPILER, "sympy", "scipy.stats", "scipy.optimize"}
    absent -= {"scipy"} if args[0] == "evaluate" else set()
    assert imported(folder, *args, heavy=tuple(absent))["end"] == []


def test_images_are_trained_on_and_predicted_without_the_compiler(folder: Path) -> None:
    heavy, cut = (*COMPILER, "transformers", "sklearn"), ("--data.samples", "60")
    flags = ("--train.epochs", "1", "--out", "digits")
    assert imported(folder, "train", "digits", *cut, *flags, heavy=heavy)["end"] == []
    flags = ("--split", "test", "--out", "y.csv")
    heavy = (*heavy, "scipy")
    assert imported(folder, "predict", "digits", *flags, heavy=heavy)["end"] == []


def test_what_torchvision_and_timm_mark_is_still_kept_from_the_compiler() -> None:
    code = """if True:
        import sys
        from fusionzoo.ground.compiler import compiler_later
        with compiler_later("timm"):
            import timm, torch
        from torchvision.ops import roi_align
        print("torch._dynamo" in sys.modules)
        box = torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0]])
        print(roi_align(torch.ones(1, 1, 4, 4), box, 1).item())
        marked = timm.layers.disable_compiler(lambda x: (torch._dynamo.graph_break(), x + 1)[1])
        print(torch.compile(lambda x: marked(x) * 2, backend="eager")(torch.ones(())).item())
        from torchvision.ops.roi_align import is_compile_supported
        print(is_compile_supported("cpu"), sys.modules["torch._dynamo.utils"].__file__ is None)
    """
    assert run_python(code).split() == ["False", "1.0", "4.0", "True", "False"]


def test_a_library_that_needs_more_of_the_compiler_gets_it() -> None:
    code = """if True:
        import sys
        from fusionzoo.ground.compiler import compiler_later
        with compiler_later("torchvision"):
            from torch._dynamo.utils import counters
        print(type(counters).__name__, sys.modules["torch._dynamo.utils"].__file__ is None)
    """
    assert run_python(code).split() == ["defaultdict", "False"]


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
