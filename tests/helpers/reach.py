"""Which test files a change can reach, read from the sources without running them.

A test file reaches what it and its conftest.py import, directly or through other modules, within
functions too; the scripts and commands that it or its helpers name in a string ("train.py",
"fusionzoo"); and other files (docs, recipes, tables) that they name, or whose folder they name.
Whoever imports a package that finds its components by their file names reaches all of them.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERYTHING = {"pyproject.toml", "setup.py", "tests/conftest.py"}  # reach every test
PACKAGES = {"fusionzoo": ROOT / "fusionzoo", "helpers": ROOT / "tests" / "helpers"}
PACKAGES |= {path.stem: path.with_suffix("") for path in (ROOT / "perf").glob("_*")}
LINKED = ("encoders", "fusion", "datasets")  # linked into fusionzoo/
DISCOVERED = {*LINKED, "fusionzoo/training/balance"}  # import what lies in their folder
COMMAND = "fusionzoo/__main__.py"  # what a string "fusionzoo" starts
SCRIPT = re.compile(r"[\w./-]+\.py\b")
IMPORT = re.compile(
    r"^[ \t]*(?:import (?P<plain>[\w., ]+)"
    r"|from (?P<dots>\.*)(?P<module>[\w.]*) import (?:\((?P<several>[^)]*)\)|(?P<names>.*)))",
    re.MULTILINE,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def changed_since(revision: str) -> set[str]:
    """Return the files that differ from a revision, those that are not committed included."""
    return {*_git("diff", "--name-only", revision), *_git("ls-files", "-o", "--exclude-standard")}


def before_this_landing() -> str:
    """Return the commit that this branch left main at, or else, on main, the newest that is three
    hours older than HEAD: what lands at once was written within that time."""
    if (left := _git("merge-base", "HEAD", "origin/main", check=False)) and left != _git(
        "rev-parse", "HEAD"
    ):
        return left[0]
    (seconds,) = _git("log", "-1", "--format=%ct")
    older = _git("rev-list", "-1", "--first-parent", f"--before={int(seconds) - 3 * 3600}", "HEAD")
    return (older or _git("rev-list", "--max-parents=0", "HEAD"))[0]


def _git(*words: str, check: bool = True) -> list[str]:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout.splitlines()


def reached(changed: Iterable[str]) -> set[str]:
    """Return the test files that a change of these files can reach, as paths below the root."""
    changed = set(changed)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    if changed & EVERYTHING:
        return files
    modules = {path for path in changed if path.endswith(".py")}
    others = changed - modules
    for path in others:  # a page or table inside a package is its folder's
        folder = Path(path).parent
        if folder.parts[:1] and folder.parts[0] in ("fusionzoo", *LINKED):
            modules |= {str(x.relative_to(ROOT)) for x in (ROOT / folder).glob("*.py")}
    names = {path: {Path(path).name, *Path(path).parts[:-1]} for path in others}
    return {
        file
        for file in files
        if modules & (_reach(file) | _conftests(file))
        or any(names[path] & _named(file) for path in others)
    }


@cache
def _named(file: str) -> set[str]:
    """Return the names of files and folders in the strings of a test file and its helpers."""
    words = {x for path in _reach(file) if path.startswith("tests/") for x in _strings(path)}
    return {part for word in words for part in word.split("/")}


@cache
def _reach(file: str) -> set[str]:
    """Return the Python files that a test file reaches, itself included."""
    return _closure([file], lambda path: _imports(path) | _scripts(path))


@cache
def _conftests(file: str) -> set[str]:
    """Return a test file's conftest.py and the helpers that it imports; what its fixtures import
    besides is not what each test needs."""
    conftests = [str(folder / "conftest.py") for folder in Path(file).parents]
    start = [path for path in conftests if (ROOT / path).is_file()]
    return _closure(start, lambda path: {x for x in _imports(path) if x.startswith("tests/")})


def _closure(todo: list[str], follow: Callable[[str], set[str]]) -> set[str]:
    seen = set(todo)
    while todo:
        more = follow(todo.pop()) - seen
        todo += more
        seen |= more
    return seen


@cache
def _imports(path: str) -> set[str]:
    package = _module(path).split(".")
    if Path(path).name != "__init__.py":
        package.pop()
    found: set[str] = set()
    for match in IMPORT.finditer(_text(path)):
        if match["plain"]:
            found |= {_file(name.split()[0]) for name in match["plain"].split(",")}
            continue
        dots, module = len(match["dots"]), match["module"]
        above = package[: len(package) - dots + 1] if dots else []
        base = ".".join([*above, *filter(None, [module])])
        names = match["several"] or match["names"]
        found |= {_file(f"{base}.{name}") for name in re.findall(r"(\w+)(?: as \w+)?", names)}
        found.add(_file(base))
    folder = str(Path(path).parent)
    if Path(path).name == "__init__.py" and folder in DISCOVERED:
        found |= {str(x.relative_to(ROOT)) for x in (ROOT / folder).rglob("*.py")}
    return found - {""}


def _scripts(path: str) -> set[str]:
    """Return the scripts that a file of the tests names."""
    if not path.startswith("tests/"):
        return set()
    words = _strings(path)
    scripts = {x for word in words for x in SCRIPT.findall(word) if (ROOT / x).is_file()}
    return scripts | {COMMAND} if "fusionzoo" in words else scripts


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def _strings(path: str) -> set[str]:
    """Return the strings in a file but for its docstrings."""
    nodes = list(ast.walk(ast.parse(_text(path))))
    docs = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, DOCUMENTED)}
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    } - docs


@cache
def _module(path: str) -> str:
    """Return the name by which a file is imported: encoders/ is fusionzoo.encoders."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] in LINKED:
        parts.insert(0, "fusionzoo")
    if parts[:2] == ["tests", "helpers"] or parts[0] == "perf":
        parts.pop(0)
    return ".".join(parts)


@cache
def _file(module: str) -> str:
    """Return the file of a module of ours, "" of another; links are followed."""
    first, *rest = module.split(".")
    if first not in PACKAGES:
        return ""
    base = PACKAGES[first].joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path.resolve().relative_to(ROOT))
    return ""
