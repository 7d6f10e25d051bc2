"""The layout: imports flow one way, names live side by side."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fusionzoo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fusionzoo"
APART = ("encoders", "fusion", "datasets")  # these three never import one another
ROOMS = (  # from the ground up: a module imports from its own room or from below
    ("errors",),
    ("files", "ground", "structures", "targets"),
    ("config",),
    ("machine",),
    APART,
    ("features", "html", "inputs", "model"),
    ("evaluation",),
    ("training",),
    ("embeddings", "inference", "testing", "zoo"),
    ("benchmark",),
    ("tools",),
    ("scripts",),
    ("api", "cli", "__main__", ""),  # "": the package itself, which names what is public
)
SMALL = 80  # lines; so small a module has several importers, or belongs inside its only one
MOST_FUNCTION_LINES = 50


def modules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages(fusionzoo.__path__, "fusionzoo.")]


@cache
def sources() -> dict[str, str]:
    return {module: source(module).read_text(encoding="utf-8") for module in modules()}


def is_init(module: str) -> bool:
    return source(module).name == "__init__.py"


def folder(module: str) -> Path:
    return source(module).parent


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


def room(module: str) -> str:
    return module.removeprefix("fusionzoo").removeprefix(".").partition(".")[0]


def floor(module: str) -> int:
    (level,) = [level for level, names in enumerate(ROOMS) if room(module) in names]
    return level


def test_imports_flow_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in sorted(others)
        if room(module) != room(other)
        and (floor(other) > floor(module) or {room(module), room(other)} <= {*APART})
    ]
    assert wrong == [], "from a room above, or beside"


def test_tools_use_the_library_and_not_one_another() -> None:
    """But `serve`, which answers searches."""
    for module, others in imports().items():
        if room(module) == "tools":
            allowed = {tool_of(module), "", "search" if tool_of(module) == "serve" else ""}
            wrong = [other for other in others if tool_of(other) not in allowed]
            assert wrong == [], f"{module} imports {wrong}"


def tool_of(module: str) -> str:
    """Return the name of the tool that a module is part of, or nothing."""
    name = module.removeprefix("fusionzoo.tools.")
    return "" if name == module else name.partition(".")[0]


def test_sources_and_shards_of_data_sets_stand_side_by_side() -> None:
    """What both need stands below both, in `datasets/` itself, and what needs both above."""
    apart = {"sources", "shards"}
    for module, others in imports().items():
        part = part_of_datasets(module)
        if part in apart:
            wrong = [x for x in others if part_of_datasets(x) in apart - {part}]
            assert wrong == [], f"{module} imports {wrong}"


def part_of_datasets(module: str) -> str:
    return module.removeprefix("fusionzoo.datasets.").partition(".")[0]


def test_a_small_module_has_several_importers_or_is_a_component() -> None:
    for module, text in sources().items():
        importers = [x for x, others in imports().items() if module in others and not is_init(x)]
        alone = len(importers) == 1 and folder(importers[0]) == folder(module)
        if alone and len(text.splitlines()) < SMALL and not is_init(module):
            assert ".register(" in text, f"{module} belongs inside {importers[0]}"


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


def test_functions_are_short() -> None:
    long = [
        f"{module}: {node.name} has {lines_of(node)} lines"
        for module, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_of(node) > MOST_FUNCTION_LINES
    ]
    assert long == []


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a body; the settings in a docstring are a table, and no code."""
    has_docstring = ast.get_docstring(function) is not None and len(function.body) > 1
    return (function.end_lineno or 0) - function.body[1 if has_docstring else 0].lineno + 1


def test_constants_stand_before_functions() -> None:
    """But for those that need something which is defined in the same module."""
    late = [
        f"{module}: {name}"
        for module, text in sources().items()
        for name in late_constants(ast.parse(text))
    ]
    assert late == []


def late_constants(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are set after a definition, though they need no name set after it."""
    below: set[str] = set()  # what is defined, or needs what is defined
    defined = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    for node in tree.body:
        if isinstance(node, defined):
            below.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and below and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for x in targets if isinstance(x, ast.Name)]
            if below & {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}:
                below.update(names)
            else:
                yield from names


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for module, text in sources().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_tests_mirror_the_folders_and_share_code_in_helpers() -> None:
    """The tests of fusionzoo/training/ are in tests/training/, those of perf/ in tests/perf/."""
    tests = ROOT / "tests"
    for path in sorted(tests.rglob("*.py")):
        place = path.relative_to(tests)
        if place.parts[0] in ("helpers", "golden"):
            continue
        tested = place.parent
        assert (PACKAGE / tested).is_dir() or (ROOT / tested).is_dir(), f"{place} mirrors no folder"
        assert place.name.startswith("test_") or place.name == "conftest.py", (
            f"{place} is no test: move it to tests/helpers"
        )


def test_loaders_are_made_in_one_place() -> None:
    """Two more: `model.py` shows the call in a message; the contract of data sets sends samples."""
    calls = {module for module, text in sources().items() if "DataLoader(" in text}
    makes = {"datasets.loader", "model.fusion_model", "testing.data"}
    assert calls == {f"fusionzoo.{module}" for module in makes}


def test_importing_fusionzoo_imports_nothing_heavy() -> None:
    heavy = "[m for m in ('torch', 'timm', 'numpy') if m in sys.modules]"
    code = f"import sys, fusionzoo; assert 'train' in dir(fusionzoo); print({heavy})"
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
        argv, call = ["fusionzoo", "train", "--help"], "run_module('fusionzoo', run_name={!r})"
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


@pytest.mark.parametrize("start", ["train.py", "embed.py", "console"])
def test_a_process_of_torchrun_ends_without_teardown(start: str) -> None:
    """A torch thread that still runs during teardown can abort a run that is done."""
    argv, call = ["x", "--help"], f"run_path({start!r}"
    if start == "console":
        argv, call = ["fusionzoo", "embed", "--help"], "run_module('fusionzoo'"
    code = (
        f"import os, runpy, sys; ended, sys.argv = os._exit, {argv!r}\n"
        "os._exit = lambda code: (os.write(1, b'without teardown'), ended(code))\n"
        f"runpy.{call}, run_name='__main__')"
    )
    assert run(sys.executable, "-c", code, WORLD_SIZE="1").endswith("without teardown")


def test_the_folder_refuses_to_be_imported_under_the_bare_name() -> None:
    code = "try: import datasets\nexcept ImportError as error: print(error)"
    assert "import `fusionzoo.datasets`" in run(sys.executable, "-c", code)


def run(*command: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
