"""Components of one's own: files, modules, installed packages, classes; and what is never run."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import fusionzoo
from fusionzoo.cli import main
from fusionzoo.config import read_yaml
from fusionzoo.encoders import ENCODERS
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.ground import plugins
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.scripts.embed import main as embed
from fusionzoo.scripts.train import main as train
from fusionzoo.training.balance import Balance
from fusionzoo.zoo import cards, facts
from helpers.python import run_python

pytestmark = pytest.mark.usefixtures("forget_plugins")
MINE = '''"""A fusion, an encoder and a data set in one file, outside of the repository."""

from zlib import crc32

import pyarrow as pa
import torch
from torch import nn

from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.encoders import ENCODERS, Encoder, Processor
from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.structures import Features, FusionOutput, masked_mean


@FUSIONS.register("own_sum", family="late", reads="pooled", paper="Own 2024")
class OwnSum(Fusion):
    """Add what each modality says.

    embedding = sum_m a_m.

    Missing: left out.
    """

    def __init__(self, dims, dim, num_outputs, *, scale: float = 1.0):
        super().__init__(dims, dim, num_outputs)
        self.project, self.scale = self.align(), scale
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features):
        aligned, present = self.aligned(features)
        embedding = self.or_null(self.scale * aligned.sum(1), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)


class OwnProcessor(Processor):
    def __call__(self, value, generator=None):
        return {"ids": torch.tensor([1, *(2 + crc32(x.encode()) % 30 for x in value.split())])}

    def blank(self):
        return self("")


@ENCODERS.register("own_words", family="text")
class OwnWords(Encoder):
    """A vector for each word."""

    kind = "text"

    def __init__(self, *, dim: int = 8):
        super().__init__()
        self.dim = dim
        self.embed = nn.Embedding(32, dim, padding_idx=0)

    def processor(self, train):
        return OwnProcessor()

    def encode(self, inputs):
        tokens, mask = self.embed(inputs["ids"]), inputs["ids"] > 0
        return Features(tokens, mask, masked_mean(tokens, mask))


@DATASETS.register("own_pairs", family="built-in")
def own_pairs(*, samples: int = 60) -> PairedDataset:
    """A number and a word that agree."""
    rows = range(samples)
    words = ["low" if row % 2 else "high" for row in rows]
    numbers = torch.tensor([[float(row % 2), 1.0] for row in rows])
    table = pa.table({
        "id": [str(row) for row in rows],
        "split": [("train", "train", "train", "val", "test")[row // 2 % 5] for row in rows],
        "target": words, "number": pa.array(rows), "text": [f"so {word}" for word in words],
    })
    encoders = {"number": {"name": "vector/mlp", "dim": 8}, "text": {"name": "own_words"}}
    kinds = {"number": "vector", "text": "text"}
    return PairedDataset(
        table, kinds, memory={"number": numbers}, source="own_pairs", encoders=encoders
    )


class Unregistered(OwnSum):
    family, at_least = "hybrid", 2


class Loose(OwnWords):
    """Not registered."""
'''
DIMS = {"a": 4, "b": 6}
ROOT = Path(__file__).parents[2]
TINY = ["--data", "own_pairs", "--fusion", "own_sum", "--fusion.dim", "8"]
RUN = [*TINY, "--train.epochs", "1", "--log", "none"]
EVIL = "from pathlib import Path\nPath({!r}).touch()\nfrom fusionzoo.fusion.early.gmu import GMU\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "own_plugin.py"
    path.parent.mkdir()
    path.write_text(MINE)
    return path


# ---- files and modules


def test_a_file_is_imported_once_under_a_name_that_follows_from_its_path(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_plugin.py").write_text(
            "from fusionzoo.fusion import FUSIONS, Fusion\n"
            f"@FUSIONS.register('own_{folder}', family='early')\nclass Own(Fusion): pass\n"
        )
    load_plugins(f"{tmp_path / 'one' / 'own_plugin.py'}, {tmp_path / 'two' / 'own_plugin.py'}")
    first = FUSIONS["own_one"].cls
    load_plugins([str(tmp_path / "two" / ".." / "one" / "own_plugin.py")])
    assert FUSIONS["own_one"].cls is first
    names = [FUSIONS[name].cls.__module__ for name in ("own_one", "own_two")]
    assert names[0] != names[1]
    assert all(name.endswith(".own_plugin") for name in names)


def test_a_file_that_was_imported_under_another_name_is_not_imported_again(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(mine.parent))
    module = importlib.import_module("own_plugin")
    load_plugins(str(mine))
    assert FUSIONS["own_sum"].cls is module.OwnSum
    load_plugins("fusionzoo/fusion/early/gmu.py".replace("fusionzoo", str(ROOT / "fusionzoo")))
    assert FUSIONS["gmu"].cls.__module__ == "fusionzoo.fusion.early.gmu"
    before = module.OwnSum
    importlib.reload(module)
    assert FUSIONS["own_sum"].cls is module.OwnSum is not before


def test_a_file_beside_it_is_imported_relatively(tmp_path: Path) -> None:
    (tmp_path / "own_plugin.py").write_text("from .own_helper import VALUE\n")
    (tmp_path / "own_helper.py").write_text("VALUE = 3\n")
    load_plugins(str(tmp_path / "own_plugin.py"))
    assert plugins.import_class(f"{tmp_path / 'own_plugin.py'}:VALUE") == 3


def test_a_module_in_the_working_folder_is_imported_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_plugin_package").mkdir()
    (tmp_path / "own_plugin_package" / "parts.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    load_plugins("own_plugin_package.parts")
    assert FUSIONS["own_sum"].cls.__module__ == "own_plugin_package.parts"
    assert FUSIONS["own_plugin_package.parts:OwnSum"].cls is FUSIONS["own_sum"].cls


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nx = (", r"SyntaxError: .*line 2"),
        ("x = 1\n\nraise KeyError('y')", r", line 3: KeyError: 'y'"),
        ("def f():\n    1 / 0\nf()", r", line 2: ZeroDivisionError"),
        ("import sys\nsys.exit('done')", r"line 2: SystemExit: done"),
        ("import no_such_package", r"line 1: ModuleNotFoundError: No module named 'no_such_pack"),
        (
            "from fusionzoo.fusion import FUSIONS, Fusion\n"
            "@FUSIONS.register('gmu', family='early')\nclass Own(Fusion): pass\n",
            r"line 2: fusion 'gmu' is registered twice: by fusionzoo\.fusion\.early\.gmu:GMU and",
        ),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "own_plugin.py"
    path.write_text(text)
    with pytest.raises(FusionZooError, match=rf"^plugin {path}.*{says}") as caught:
        load_plugins(str(path))
    assert "\n" not in str(caught.value)
    path.write_text("FIXED = True")
    load_plugins(str(path))


def test_a_fresh_process_unpickles_what_a_plugin_file_defines(mine: Path) -> None:
    """As a loader's worker does where processes are spawned: on macOS, on Windows."""
    load_plugins(str(mine))
    prepare = fusionzoo.create_encoder("text", "own_words").processor(True)
    data = pickle.dumps(prepare).hex()
    code = (
        "import pickle, sys\nprepare = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(prepare('a b')['ids'].tolist())"
    )
    assert run_python(code, data) == f"{prepare('a b')['ids'].tolist()}\n"


# ---- installed packages


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Put a package with entry points on the path, as pip would."""
    points = [f"{name} = {name}" for name in modules]
    about = folder / "own_package-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(["[fusionzoo.plugins]", *points]))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(plugins, "_loaded_groups", set())


@pytest.mark.parametrize("ask", ["name", "contains", "list", "encoder"])
def test_an_installed_plugin_is_imported_when_a_name_is_unknown_or_all_are_listed(
    ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, own_plugin_installed=MINE)
    assert FUSIONS["gmu"].name == "gmu"
    fusionzoo.create_encoder("text", "chars", dim=8)
    assert "own_plugin_installed" not in sys.modules
    if ask == "name":
        assert fusionzoo.create_fusion("own_sum", DIMS, 8, 3).dim == 8
    elif ask == "contains":
        assert "own_sum" in FUSIONS
    elif ask == "list":
        assert "own_sum" in fusionzoo.list_fusions("late")
    else:
        assert fusionzoo.create_encoder("text", "own_words").kind == "text"
    assert "own_plugin_installed" in sys.modules


def test_an_installed_plugin_that_fails_is_a_warning_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"own_plugin_broken": "1 / 0", "own_plugin_fine": MINE}
    install(tmp_path, monkeypatch, **broken)
    with caplog.at_level(logging.WARNING):
        assert "own_sum" in FUSIONS
        assert len(FUSIONS) > 1
    (record,) = caplog.records
    assert "own_plugin_broken" in record.message
    assert "ZeroDivisionError: division by zero" in record.message


def test_the_zoo_shows_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts.facts()
    install(tmp_path, monkeypatch, own_plugin_installed=MINE)
    installed = facts.facts()
    (own,) = [card for card in installed.fusions if card not in before.fusions]
    assert (own.name, own.paper) == ("own_sum", "Own 2024") and own.parameters > 0
    assert "own_words" in [card.name for card in installed.encoders]
    assert installed.fusions[0] == before.fusions[0]


# ---- module:Class


def test_a_class_needs_no_registration(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    for name in (f"{mine}:Unregistered", "own_plugin.py:Unregistered", "own_plugin:Unregistered"):
        entry = fusionzoo.fusion_info(name)
        assert (entry.name, entry.family, entry.reads, entry.at_least) == (
            *(name, "hybrid", "tokens", 2),
        )
        assert list(entry.parameters) == ["scale", "linear_skip"]
        assert fusionzoo.create_fusion(name, DIMS, 8, 3, scale=2.0).dim == 8
        with pytest.raises(FusionZooError, match=r"has no setting 'scael'\. Did you mean 'scale'"):
            fusionzoo.create_fusion(name, DIMS, 8, 3, scael=2.0)
    with pytest.raises(FusionZooError, match="needs at least 2 modalities"):
        fusionzoo.create_fusion("own_plugin:Unregistered", {"a": 3}, 8, 3)
    registered = fusionzoo.fusion_info("own_plugin.py:OwnSum")
    assert (registered.family, registered.reads, registered.paper) == ("late", "pooled", "Own 2024")
    encoder = fusionzoo.create_encoder("words", "own_plugin.py:Loose", kind="text", dim=4)
    assert (encoder.kind, encoder.dim, encoder.spec["name"]) == ("text", 4, "own_plugin.py:Loose")
    assert not [name for name in (*FUSIONS, *ENCODERS) if ":" in name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_plugin:OwnWords", "is no fusion: it must be a subclass of fusionzoo.fusion.Fusion"),
        ("own_plugin:OwnSun", "own_plugin has no 'OwnSun'. Did you mean 'OwnSum'?"),
        ("own_plugi:OwnSum", "plugin own_plugi: ModuleNotFoundError"),
        ("none.py:OwnSum", "plugin none.py: there is no file /"),
        ("not-a-name.py:OwnSum", "'not-a-name' is no name for a module"),
    ],
)
def test_a_class_that_does_not_fit_is_one_line(
    name: str, says: str, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    Path("not-a-name.py").touch()
    with pytest.raises(FusionZooError) as caught:
        fusionzoo.create_fusion(name, DIMS, 8, 3)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- fusionzoo.register


def test_register_takes_classes_and_functions_of_a_notebook() -> None:
    class MyFusion(Fusion):
        """Mine."""

    class MyEncoder(fusionzoo.encoders.Encoder):
        kind = "audio"

    class Kinder(Balance):
        pass

    def some_data() -> Any: ...

    assert fusionzoo.register(MyFusion) is MyFusion
    assert fusionzoo.fusion_info("my_fusion").family == "early"
    fusionzoo.register(MyFusion, name="other", family="late", paper="Mine 2024", synergy=False)
    entry = fusionzoo.fusion_info("other")
    assert (entry.family, entry.paper, entry.synergy) == ("late", "Mine 2024", False)
    fusionzoo.register(MyEncoder)
    assert ENCODERS["my_encoder"].family == "audio"
    fusionzoo.register(some_data)
    assert "some_data" in fusionzoo.list_datasets()
    with pytest.raises(FusionZooError, match=r"family= is missing\. There are: data, loss"):
        fusionzoo.register(Kinder)
    with pytest.raises(FusionZooError, match="'some_data' is registered twice"):
        fusionzoo.register(lambda: None, kind="dataset", name="some_data")
    with pytest.raises(FusionZooError, match=r"kind='fushion' .* Did you mean 'fusion'"):
        fusionzoo.register(MyFusion, kind="fushion")
    with pytest.raises(FusionZooError, match="MyFusion is no subclass of Encoder"):
        fusionzoo.register(MyFusion, kind="encoder")
    with pytest.raises(FusionZooError, match="dict is a subclass of none of Fusion, Encoder"):
        fusionzoo.register(dict)


# ---- model folders


def test_a_model_folder_names_its_plugins_and_loads_once_they_are_imported(
    mine: Path, tmp_path: Path, forget_plugins: Callable[[], None]
) -> None:
    load_plugins(str(mine))
    encoders = {"text": "own_words", "number": {"name": "vector/mlp", "in_dim": 2, "dim": 4}}
    kinds = {"text": "text", "number": "vector"}
    fusion = {"name": "own_sum", "dim": 8}
    model = fusionzoo.create_model(fusion, encoders, classes=["a", "b"], kinds=kinds).eval()
    folder = model.save(tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["plugins"] == ["own_plugin.py"]
    sample = [{"text": "some words", "number": torch.ones(2)}]
    expected = model.embed(sample)["fused"]
    forget_plugins()
    with pytest.raises(FusionZooError) as caught:
        fusionzoo.load(folder)
    for part in ("unknown encoder 'own_words'", "own_plugin.py", "plugins=['own_plugin.py']"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    loaded = fusionzoo.load(folder, plugins=[str(mine)])
    assert torch.equal(loaded.embed(sample)["fused"], expected)


def test_a_model_whose_class_has_no_name_in_a_registry_loads_once_it_is_imported(
    mine: Path, tmp_path: Path, forget_plugins: Callable[[], None]
) -> None:
    fusion = {"name": f"{mine}:Unregistered", "dim": 8}
    encoders = {name: {"name": "vector/identity", "in_dim": 3} for name in ("a", "b")}
    kinds = dict.fromkeys(encoders, "vector")
    folder = fusionzoo.create_model(fusion, encoders, 2, kinds=kinds).save(tmp_path / "model")
    moved = mine.rename(tmp_path / "own_plugin.py")
    forget_plugins()
    with pytest.raises(FusionZooError, match="is not imported, and no model folder may import it"):
        fusionzoo.load(folder)
    assert type(fusionzoo.load(folder, plugins=str(moved)).fusion).__name__ == "Unregistered"


@pytest.mark.parametrize(
    "changes",
    [
        {"plugins": ["evil.py", "evil"], "fusion": {"name": "evil", "dim": 8}},
        {"fusion": {"name": "evil:GMU", "dim": 8}},
        {"fusion": {"name": "evil.py:GMU", "dim": 8}},
        {"fusion": {"name": "{folder}/evil.py:GMU", "dim": 8}},
        {"fusion": {"name": "missing_tokens", "base": "evil:GMU", "dim": 8}},
        {"fusion": {"name": "i2moe", "base": "evil:GMU", "dim": 8}},
        {"encoders": {"text": {"name": "evil:GMU"}}},
        {"encoders": {"text": {"name": "{folder}/evil.py:GMU"}}},
    ],
)
def test_no_code_that_a_model_folder_names_is_ever_run(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = {"name": "gmu", "dim": 8}
    folder = fusionzoo.create_model(fusion, {"text": "chars"}, 2).save(tmp_path / "model")
    (folder / "digests.json").unlink()  # its author may write what he likes
    config = json.loads((folder / "config.json").read_text())
    changed = json.dumps(config | changes).replace("{folder}", str(folder))
    (folder / "config.json").write_text(changed)
    for place in (tmp_path, folder):
        (place / "evil.py").write_text(EVIL.format(str(tmp_path / "was run")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FusionZooError) as caught:
        fusionzoo.load(folder)
    assert "\n" not in str(caught.value)
    assert "evil" in str(caught.value)
    assert not (tmp_path / "was run").exists()
    with pytest.raises(FusionZooError):
        embed_of(folder, tmp_path)
    assert not (tmp_path / "was run").exists()


def embed_of(folder: Path, tmp_path: Path) -> None:
    from fusionzoo.config import EmbedConfig
    from fusionzoo.embeddings.run import embed as write
    from fusionzoo.machine.distributed import World

    data = {"name": "digits", "modalities": "text"}
    write(EmbedConfig(model=str(folder), data=data, out=str(tmp_path / "e.parquet")), World())


# ---- the commands


def test_a_plugin_is_trained_embedded_and_resumed_and_never_imported_unasked(
    mine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    forget_plugins: Callable[[], None],
) -> None:
    """Embedding says which plugins a run needs: its folder may be a stranger's."""
    out = tmp_path / "run"
    assert train([*RUN, "--plugins", str(mine), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"--plugins {mine}" in next(x for x in shown.splitlines() if x.startswith("next"))
    assert read_yaml(out / "config.yaml")["plugins"] == str(mine)
    goes_on = ["--resume", "--out", str(out), "--train.epochs", "2"]
    assert train(goes_on) == 2
    assert f"trained with --plugins {mine}, which is not imported" in capsys.readouterr().err
    assert train([*goes_on, "--plugins", str(mine)]) == 0
    assert json.loads((out / "metrics.json").read_text())["test"]["accuracy"] >= 0
    vectors = tmp_path / "e.parquet"
    flags = ["--model", str(out), "--plugins", str(mine), "--out", str(vectors)]
    assert embed(flags) == 0
    assert pq.read_table(vectors).num_rows == 60
    forget_plugins()
    capsys.readouterr()
    flags = ["--model", str(out), "--out", str(tmp_path / "e.parquet")]
    assert embed(flags) == 2
    shown = capsys.readouterr().err
    assert "on the command line --plugins own_plugin.py" in shown
    assert shown.count("\n") == 1
    encoders = {"text": {"name": "chars", "dim": 8}}
    fusionzoo.create_model("sum", encoders, classes=["high", "low"]).save(out / "model")
    assert embed(flags) == 2
    shown = capsys.readouterr().err
    assert f"unknown data set 'own_pairs': the run was trained with --plugins {mine}" in shown


def test_zoo_and_data_take_plugins_before_and_after_the_action(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "facts.json").write_text(facts.Facts([cards.card("gmu")], [], []).to_json())
    monkeypatch.setattr(facts, "FILE", tmp_path / "facts.json")
    monkeypatch.setattr("fusionzoo.fusion.list_fusions", lambda: ["gmu", "own_sum"])
    flags = ["--plugins", str(mine)]
    for command in (["zoo", *flags], ["zoo", "list", *flags], ["zoo", *flags, "list"]):
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert "2 fusions" in shown and "own_sum" in shown and "own_words" in shown
    assert main(["zoo", "info", "own_sum", *flags]) == 0
    shown = capsys.readouterr().out
    assert "own_sum  (late fusion, reads pooled)" in shown and "--fusion.scale" in shown
    assert main(["zoo", "info", "own_words", *flags]) == 0
    assert "own_words  (text encoder)" in capsys.readouterr().out
    for command in (["data", *flags], ["data", "list", *flags], ["data", *flags, "list"]):
        assert main(command) == 0
        assert "A number and a word that agree." in capsys.readouterr().out
    assert main(["zoo", "--plugins", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["own_sum", "own_plugin.py:Unregistered"])
def test_zoo_check_holds_a_plugins_fusion_to_the_contract(
    target: str, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusionzoo.testing import fusions, runner
    from fusionzoo.testing.checks import Checks

    monkeypatch.chdir(mine.parent)
    few = Checks(dict(list(fusions.CHECKS.items())[:3]))
    suite = runner.SUITES["fusion"]()._replace(checks=few)
    monkeypatch.setitem(runner.SUITES, "fusion", lambda: suite)
    assert main(["zoo", "check", target, "--plugins", str(mine)]) == 0
    assert "3 of 3 checks passed" in capsys.readouterr().out


# ---- the whole way, in processes of their own

WHOLE = [*TINY, "--fusion.scale", "0.5"]


@pytest.mark.slow
def test_everything_works_from_the_command_line_and_in_worker_processes(
    mine: Path, tmp_path: Path
) -> None:
    """Trained by two processes, embedded, benchmarked by spawned ones; loaded from Python."""
    own = ["--plugins", os.path.relpath(mine, tmp_path)]
    code = "import sys; from fusionzoo.cli import main; sys.exit(main(sys.argv[1:]))"
    cache = {"FUSIONZOO_CACHE": str(tmp_path / "cache")}

    def command(*args: str) -> None:
        run_python(code, *args, *own, cwd=tmp_path, **cache)

    command("train", *WHOLE, "--train.epochs", "1", "--log", "none", "--out", "run",
            "--dist.nproc", "2", "--train.num_workers", "1")  # fmt: skip
    command("embed", "--model", "run", "--out", "e.parquet")
    assert pq.read_table(tmp_path / "e.parquet").num_rows == 60
    reference = f"{os.path.relpath(mine, tmp_path)}:Unregistered"
    bench = ["--data", "own_pairs", "--seeds", "1", "--epochs", "1", "--jobs", "2"]
    bench += ["--encoder_epochs", "1", "--controls", "false", "--corruptions", "false"]
    bench += ["--folds", "0", "--tune", "0"]
    command("benchmark", *bench, "--fusions", f"sum,own_sum,{reference}", "--out", "report")
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    families = {line["candidate"]: line["family"] for line in summary["leaderboard"]}
    assert (families["own_sum"], families[reference]) == ("late", "hybrid")
    load = (
        "import sys, fusionzoo as fz\n"
        "model = fz.load('run', plugins=[sys.argv[1]])\n"
        "print(model.predict([{'text': 'so high'}])[0].label)"
    )
    assert run_python(load, str(mine), cwd=tmp_path).strip() in ("high", "low")


def test_a_plugins_changed_code_makes_benchmark_cells_anew(mine: Path, tmp_path: Path) -> None:
    from fusionzoo.benchmark import schedule
    from fusionzoo.benchmark.bench import open_bench
    from fusionzoo.config import BenchmarkConfig

    load_plugins(str(mine))
    cfg = BenchmarkConfig(data={"name": "own_pairs"}, seeds=1, folds=0, tune=0, controls=False)
    cfg = replace(cfg, out=str(tmp_path))
    bench = replace(open_bench(cfg)[0], features=({},))
    jobs = {job.candidate: job for job in schedule.list_jobs(bench, ["sum", "own_sum"])}
    before = {name: schedule.path_of(bench, job) for name, job in jobs.items()}
    mine.write_text(MINE + "\n# changed\n")
    after = {name: schedule.path_of(bench, job) for name, job in jobs.items()}
    assert before["sum"] == after["sum"]
    assert before["own_sum"] != after["own_sum"]
