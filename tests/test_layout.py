"""The layout: imports flow one way, names live side by side."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fusionzoo

ROOT = Path(__file__).parents[1]
FLOORS = (  # from the ground up: a module imports from its own floor's room or from below
    ("errors", "version", "sources", "_unlinked"),
    ("console", "checks", "files", "rng", "cells", "predictions", "plugins", "structures"),
    ("allocation", "digests", "resampling", "worker_memory"),
    ("registry", "targets", "unimodal", "standardise"),
    ("config",),
    ("distributed",),
    ("encoders", "fusion", "datasets"),
    ("features",),
    ("model_folder", "trained_on"),
    ("eval_mode",),
    ("present_rows",),
    ("model",),
    ("creating",),
    ("loading",),
    ("evaluation",),
    ("training.tasks", "training.optim", "training.data"),
    ("training.balance",),
    ("training.objective",),
    ("training.reduction", "training.nonfinite"),
    ("training.trainer",),
    ("training.evaluate", "training.build", "training.runs"),
    ("training.fit",),
    ("components",),
    ("zoo",),
    ("inputs", "inference"),
    ("audit",),
    ("vectors",),
    ("embedding_report",),
    ("benchmark.metric", "benchmark.clock"),
    ("benchmark.folds",),
    ("benchmark.bench",),
    ("benchmark.strategies", "benchmark.executors", "benchmark.trainers"),
    ("benchmark.fit", "benchmark.balanced"),
    ("benchmark.features",),
    ("benchmark.inputs",),
    ("benchmark.trials",),
    ("analysis.codes", "analysis.decompose", "analysis.emap", "analysis.pid", "analysis.advice"),
    ("analysis.by_batch", "analysis.by_sample", "analysis.probes", "analysis.probed"),
    ("benchmark.report",),
    ("benchmark.api",),
    ("analysis",),
    ("data_convert",),
    ("scripts", "data_command"),
    ("api", "commands"),
    ("cli",),
    ("__main__",),
)
MOST_FUNCTION_LINES = 50


def modules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages(fusionzoo.__path__, "fusionzoo.")]


def source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return Path(spec.origin)


@cache
def imports() -> dict[str, set[str]]:
    """Every module, and the modules of fusionzoo that it imports anywhere: at its top, within a
    function, or for the type checker."""
    known = set(modules())
    return {module: imported(module, known) - {module} for module in known}


def imported(module: str, known: set[str]) -> set[str]:
    is_package = source(module).name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source(module).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = package.split(".")
        base = parts[: len(parts) - node.level + 1] if node.level else []
        name = ".".join([*base, node.module or ""]).strip(".")
        for alias in node.names:
            full = f"{name}.{alias.name}"
            found |= {full if full in known else name} & known
    return found


def floor(module: str) -> int:
    inside = module.removeprefix("fusionzoo.")
    if inside == "benchmark":  # the package that can be called
        inside = "benchmark.api"
    levels = [
        level
        for level, names in enumerate(FLOORS)
        if any(inside == name or inside.startswith(f"{name}.") for name in names)
    ]
    if levels:
        return levels[0]
    # A package stands below what is in it: importing `training.optim.ema` imports `training` too.
    return -1


def room(module: str) -> str:
    return module.removeprefix("fusionzoo.").partition(".")[0]


@pytest.mark.parametrize("module", modules())
def test_imports_flow_one_way(module: str) -> None:
    for other in imports()[module]:
        if room(module) == room(other):
            assert floor(other) <= floor(module), f"{module} imports {other}, which stands above"
        else:
            assert floor(other) < floor(module), f"{module} imports {other}: not from below"


def test_every_module_has_a_floor() -> None:
    packages = {"fusionzoo.training", "fusionzoo.benchmark"}
    assert [name for name in modules() if floor(name) < 0 and name not in packages] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also within a room; a package's `__init__` that gathers names is no part of a circle."""
    try:
        graph = {
            module: {other for other in others if source(other).name != "__init__.py"}
            for module, others in imports().items()
        }
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_room_of_training_is_crowded() -> None:
    folder = source("fusionzoo.training").parent
    rooms = [x for x in folder.iterdir() if x.suffix == ".py" or (x / "__init__.py").is_file()]
    assert len(rooms) - 1 <= 12  # but for __init__


@pytest.mark.parametrize("module", modules())
def test_functions_are_short(module: str) -> None:
    text = source(module).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[1 if has_docstring else 0]  # settings are a table, and no code
            lines = (node.end_lineno or 0) - first.lineno + 1
            assert lines <= MOST_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_importing_fusionzoo_imports_nothing_heavy() -> None:
    code = (
        "import sys, fusionzoo; print([m for m in ('torch', 'timm', 'numpy') if m in sys.modules])"
    )
    assert run(sys.executable, "-c", code) == "[]\n"


def test_the_public_names_are_the_ones_that_the_design_fixes() -> None:
    for name in fusionzoo.__all__:
        assert getattr(fusionzoo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = fusionzoo.modle  # type: ignore[attr-defined]


def test_help_needs_no_torch() -> None:
    for command in (["--help"], ["train", "--help"], ["embed", "--help"], ["benchmark", "--help"]):
        code = (
            "import sys; from fusionzoo.cli import main\n"
            f"try: main({command!r})\nexcept SystemExit: pass\n"
            "print('torch' in sys.modules)"
        )
        assert run(sys.executable, "-c", code).endswith("False\n")


@pytest.mark.parametrize("start", ["train.py", "embed.py", "benchmark.py", "console"])
def test_hugging_face_datasets_is_reachable_from_every_way_in(start: str) -> None:
    """The scripts stand beside a folder `datasets`, which must not hide the installed package."""
    if start == "console":
        argv, call = ["fusionzoo", "train", "--help"], "run_module('fusionzoo.cli', run_name={!r})"
    else:
        argv, call = [start, "--help"], f"run_path({start!r}, run_name={{!r}})"
    code = (
        f"import runpy, sys; sys.argv = {argv!r}\n"
        f"try: runpy.{call.format('__main__')}\nexcept SystemExit: pass\n"
        "import datasets; print(datasets.Dataset.__name__)"
    )
    # `python -c` puts the working folder first, as `python train.py` puts the script's.
    safe = ["-P"] if start == "console" else []
    assert run(sys.executable, *safe, "-c", code).endswith("Dataset\n")


def test_the_folder_refuses_to_be_imported_under_the_bare_name() -> None:
    code = "try: import datasets\nexcept ImportError as error: print(error)"
    assert "import `fusionzoo.datasets`" in run(sys.executable, "-c", code)


def run(*command: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
