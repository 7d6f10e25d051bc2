"""The layout: imports flow one way, names live side by side."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fusionzoo

ROOT = Path(__file__).parents[1]
LEVELS = {
    name: level
    for level, names in enumerate(
        (
            ("errors", "version", "_unlinked"),
            ("console", "files", "registry", "structures", "targets", "config"),
            ("distributed", "encoders", "fusion", "datasets", "model_folder", "unimodal"),
            ("model",),
            ("evaluation",),
            ("training",),
            ("zoo",),
            ("benchmark",),
            ("scripts",),
            ("cli",),
            ("__main__",),
        )
    )
    for name in names
}


def modules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages(fusionzoo.__path__, "fusionzoo.")]


def imported(module: str) -> set[str]:
    """The parts of fusionzoo that a module imports, anywhere in its source."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    tree = ast.parse(Path(spec.origin).read_text())
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            name = ".".join([*base, node.module or ""]).strip(".") if node.level else node.module
            names = (
                [f"{name}.{alias.name}" for alias in node.names] if name == "fusionzoo" else [name]
            )
            found |= {n.split(".")[1] for n in names if n and n.startswith("fusionzoo.")}
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_flow_one_way(module: str) -> None:
    part = module.split(".")[1]
    for other in imported(module) & set(LEVELS):
        if other != part:
            assert LEVELS[other] < LEVELS[part], f"{module} imports {other}"


def test_every_module_has_a_level() -> None:
    assert {name.split(".")[1] for name in modules()} <= set(LEVELS)


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
