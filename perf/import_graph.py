"""Print the import graph of a revision as a table: python perf/import_graph.py [REVISION].

Counts files, code lines and imports per room, lists modules whose only importer stands in the same
folder, and import cycles. Lazy and TYPE_CHECKING imports count; an `__init__` that only gathers
names is no part of a cycle and no importer. Code lines are those without blank lines, comments and
docstrings.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from graphlib import CycleError, TopologicalSorter

ROOMS = ("encoders", "fusion", "datasets", "fusionzoo")
SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
SPACE += (tokenize.ENDMARKER,)
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


def code_lines(source: str) -> int:
    """Count the lines with code: no blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SPACE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def hidden_modules(graph: Graph, modules: dict[str, str]) -> list[str]:
    """Return the modules that only one module imports, which stands in the same folder."""
    importers: dict[str, list[str]] = {module: [] for module in modules}
    for module, names in graph.items():
        for name in names if not modules[module].endswith("__init__.py") else ():
            importers[name].append(module)
    return [
        module
        for module, users in importers.items()
        if len(users) == 1
        and users[0].rpartition(".")[0] == module.rpartition(".")[0]
        and not modules[module].endswith("__init__.py")
    ]


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
    sources = {module: git("show", f"{revision}:{path}") for module, path in modules.items()}
    graph = {x: imports_of(x, modules[x], sources[x], modules) for x in modules}
    files, code, inside, outside = (Counter[str]() for _ in range(4))
    for module, names in graph.items():
        room = room_of(module, modules)
        files[room] += 1
        code[room] += code_lines(sources[module])
        for name in names:
            (inside if room_of(name, modules) == room else outside)[room] += 1
    print(
        "| room | files | code lines | imports inside | imports from other rooms |\n"
        "| --- | ---: | ---: | ---: | ---: |"
    )
    for room in sorted(files):
        print(f"| {room} | {files[room]} | {code[room]} | {inside[room]} | {outside[room]} |")
    print(f"| all | {files.total()} | {code.total()} | {inside.total()} | {outside.total()} |")
    lines = sum(source.count("\n") for source in sources.values())
    hidden = hidden_modules(graph, modules)
    print(f"\n{lines} lines, {code.total() / files.total():.0f} code lines a file")
    print(f"{len(hidden)} modules with one importer, in their folder: {', '.join(hidden)}")
    print(f"\nfirst cycle: {first_cycle(graph, modules)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
