"""What docstrings and comments name exists: files, modules, and attributes of both."""

from __future__ import annotations

import ast
import re
from abc import ABC
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Generic, Protocol

import pytest
from torch import nn

import fusionzoo

ROOT = Path(__file__).parents[1]
LINKED = ("encoders", "fusion", "datasets")
ROOTS = (ROOT, ROOT / "fusionzoo", ROOT / "tests", ROOT / "perf", ROOT / "docs")
OTHERS = {"data", "encoders", "fusion", "optim", "train"}  # sections of a recipe: `data.root`
OTHERS |= {"model"}  # a model, of which attributes are named
PLAIN = {"Module": nn.Module, "ABC": ABC, "Generic": Generic, "Protocol": Protocol}
PLAIN |= {"NamedTuple": tuple}  # bases of which we know the attributes
FILE = re.compile(r"[\w./]+\.py")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.(?!arrow|json|npy|safetensors)\w+)+")


@cache
def paths() -> dict[Path, str]:
    """Return all files with the name of their module below fusionzoo, such as `encoders.base`."""
    found = {}
    for room in (*LINKED, "fusionzoo"):
        top = ROOT / room if room == "fusionzoo" else ROOT
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            if room != "fusionzoo" or parts[0] not in LINKED:  # not by its link as well
                found[path] = ".".join(parts).removesuffix("__init__").strip(".")
    return found


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax of every module."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for path, name in paths().items()}


def named(node: ast.AST) -> Iterator[str]:
    """Yield what a statement defines in the module or class that it stands in."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (x.asname or x.name.partition(".")[0] for x in node.names)
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    else:
        for child in ast.iter_child_nodes(node):
            yield from named(child)


@cache
def contents() -> dict[str, set[str]]:
    """Return the names in each module, and the modules in each package."""
    trees = modules().items()
    found = {name: {x for node in tree.body for x in named(node)} for name, tree in trees}
    for name in modules():
        package, _, last = name.rpartition(".")
        if package in found:  # else a folder of files that are copied, `tools/export/example`
            found[package].add(last)
    found[""] |= {*fusionzoo.__all__}
    return found


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Return the classes at the top of modules by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for tree in modules().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def has_member(cls: str, name: str) -> bool:
    """Whether classes of this name, or their bases, have an attribute; others' bases may."""
    for node in classes()[cls]:
        for part in node.body:
            inside = ast.walk(part) if isinstance(part, ast.FunctionDef) else ()  # self.x = ...
            if name in named(part) or any(name in named(x) for x in inside):
                return True
        for base in node.bases:
            text = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if text in classes():
                if text != cls and has_member(text, name):
                    return True
            elif text not in PLAIN or hasattr(PLAIN[text], name):
                return True
    return False


def exists(word: str, path: Path) -> bool:
    """Whether a file, or a dotted name that begins with one of ours, is there."""
    if FILE.fullmatch(word):
        is_example = word.startswith("my_")
        return is_example or any((root / word).is_file() for root in (path.parent, *ROOTS))
    first, *rest = word.split(".")
    if first in ("fusionzoo", "fz"):
        return reaches("", rest)
    if first in classes():
        return has_member(first, rest[0])
    homes = [name for name in contents() if name.rpartition(".")[2] == first]
    return not homes or first in OTHERS or any(reaches(home, rest) for home in homes)


def reaches(module: str, parts: list[str]) -> bool:
    """Whether a dotted name leads somewhere from a module, as far as a class's attribute."""
    if not parts:
        return True
    inside = f"{module}.{parts[0]}".strip(".")
    if inside in contents():
        return reaches(inside, parts[1:])
    if parts[0] not in contents()[module]:
        return False
    return len(parts) == 1 or parts[0] not in classes() or has_member(parts[0], parts[1])


def test_what_docstrings_and_comments_name_exists() -> None:
    lost = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in paths()
        for word in re.findall(r"`([\w./]+)(?:\(\))?`", path.read_text(encoding="utf-8"))
        if (FILE.fullmatch(word) or DOTTED.fullmatch(word)) and not exists(word, path)
    ]
    assert lost == []


@pytest.mark.parametrize(
    "word",
    [
        *("training/gone.py", "fusionzoo.gone", "fusionzoo.files.gone", "files.gone"),
        *("Encoder.gone", "registry.Registry.gone", "features.frozen.Caching.gone"),
    ],
)
def test_what_is_gone_is_noticed(word: str) -> None:
    assert not exists(word, ROOT / "fusionzoo" / "model.py")
