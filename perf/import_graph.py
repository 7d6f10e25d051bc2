"""Print the import graph of a revision as a table: python perf/import_graph.py [REVISION].

Counts files and imports per room, and lists import cycles. Lazy and TYPE_CHECKING imports count; an
`__init__` that only gathers names is no part of a cycle.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

ROOMS = ("encoders", "fusion", "datasets", "fusionzoo")
Graph = dict[str, set[str]]


def git(*args: str) -> str:
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout


def module_files(revision: str) -> dict[str, str]:
    """Return {module: path} of the package; symbolic links are left out."""
    modules = {}
    for line in git("ls-tree", "-r", revision, *(f"{room}/" for room in ROOMS)).splitlines():
        facts, path = line.split("\t")
        if path.endswith(".py") and not facts.startswith("120000"):
            inside = path if path.startswith("fusionzoo/") else f"fusionzoo/{path}"
            modules[inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = path
    return modules


def imports_of(module: str, path: str, source: str, modules: dict[str, str]) -> set[str]:
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    parts = package.split(".")
    imports = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            name = ".".join([*base, node.module or ""]).strip(".")
            for alias in node.names:
                full = f"{name}.{alias.name}"
                imports |= {full if full in modules else name} & modules.keys()
    return imports - {module}


def room_of(module: str, modules: dict[str, str]) -> str:
    top = ".".join(module.split(".")[:2])
    is_folder = modules[top].endswith("__init__.py") and top != "fusionzoo"
    return top.removeprefix("fusionzoo.") if is_folder else "single files"


def first_cycle(graph: Graph, modules: dict[str, str]) -> str:
    try:
        plain = {
            module: {name for name in names if not modules[name].endswith("__init__.py")}
            for module, names in graph.items()
        }
        tuple(TopologicalSorter(plain).static_order())
    except CycleError as error:
        return " -> ".join(error.args[1])
    return "none"


def main(revision: str) -> None:
    modules = module_files(revision)
    graph = {
        module: imports_of(module, path, git("show", f"{revision}:{path}"), modules)
        for module, path in modules.items()
    }
    files, inside, outside = Counter[str](), Counter[str](), Counter[str]()
    for module, names in graph.items():
        room = room_of(module, modules)
        files[room] += 1
        for name in names:
            (inside if room_of(name, modules) == room else outside)[room] += 1
    print(
        "| room | files | imports inside | imports from other rooms |\n| --- | ---: | ---: | ---: |"
    )
    for room in sorted(files):
        print(f"| {room} | {files[room]} | {inside[room]} | {outside[room]} |")
    print(f"| all | {files.total()} | {inside.total()} | {outside.total()} |")
    print(f"\nfirst cycle: {first_cycle(graph, modules)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
