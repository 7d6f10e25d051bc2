"""What an exported folder holds beside its graphs: preprocessing, labels and an example script."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fusionzoo.files import write_json, write_text
from fusionzoo.model.fusion_model import FusionModel

from .preprocess import OWN, describe
from .runtime import FORMAT, LABELS, PREPROCESS

EXAMPLE = Path(__file__).with_name("example.template.py")
OF_FUNCTIONS = {"datetime", "math", "re"}  # modules that only some functions of the example use


def write_preprocess(model: FusionModel, folder: Path, inputs: Collection[str]) -> dict[str, Any]:
    """Write preprocess.json and the files it names; return its contents."""
    modalities = {}
    for name, encoder in model.named_encoders():
        modalities[name] = {
            "kind": encoder.kind,
            "inputs": [x for x in inputs if x.startswith(f"{name}.")],
            "one_length": encoder.one_length,
            "processor": describe(encoder, folder / name, model.data_settings),
        }
    about = {"format": FORMAT, "modalities": modalities}
    write_json(folder / PREPROCESS, about)
    return about


def write_labels(model: FusionModel, folder: Path) -> list[dict[str, Any]]:
    """Write labels.json: classes, targets, and how each target's logits are read."""
    targets = model.answer_targets if model.targets or model.classes else []
    decode: list[dict[str, Any]] = []
    first = 0
    for target in targets:
        last = first + target.width
        entry: dict[str, Any] = {"name": target.name, "kind": target.standard_kind()}
        entry |= {"classes": list(target.classes), "first": first, "last": last}
        decode.append(entry | {"mean": target.mean, "deviation": target.deviation})
        first = last
    specs = None if model.targets is None else [{"spec": x.spec} for x in model.targets]
    contents = {"format": FORMAT, "classes": model.classes, "targets": specs, "decode": decode}
    write_json(folder / LABELS, contents)
    return decode


def write_example(about: Mapping[str, Any], decode: list[dict[str, Any]], folder: Path) -> None:
    """Write example.py with the functions that this model needs; none for a processor of one's
    own."""
    processors = [x["processor"] for x in about["modalities"].values()]
    if any(x["by"] == OWN for x in processors):
        return
    needed = {x["by"] for x in processors} | {x["kind"] for x in decode}
    facts = {
        "fit": {x.get("fit") for x in processors},
        "least": {x.get("least") for x in processors},
    }
    write_text(folder / "example.py", example(needed, facts))


def example(needed: Collection[str], facts: Mapping[str, Collection[Any]]) -> str:
    """Return the example's source without the functions, branches and imports it does not need."""
    source = EXAMPLE.read_text(encoding="utf-8")
    body = ast.parse(source).body
    functions = {x.name: x for x in body if isinstance(x, ast.FunctionDef)}
    kept = {"answer", *needed}
    while more := {x for name in kept for x in _names(functions[name])} & functions.keys() - kept:
        kept |= more
    used = {x for name in kept for x in _names(functions[name])}
    dropped: set[int] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            if node.name not in kept:
                dropped |= {*_lines(node), node.lineno - 1, node.lineno - 2}
            for part in node.body:
                if isinstance(part, ast.If) and not _holds(part.test, facts):
                    dropped |= _lines(part)
        elif isinstance(node, ast.Import) and node.names[0].name in OF_FUNCTIONS - used:
            dropped |= _lines(node)
    lines = source.splitlines()
    return "\n".join(x for number, x in enumerate(lines, 1) if number not in dropped) + "\n"


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _holds(test: ast.expr, facts: Mapping[str, Collection[Any]]) -> bool:
    """Whether a branch on `by["fit"] == "pad"` or `by["least"]` is taken for some modality."""
    fact = test.left if isinstance(test, ast.Compare) else test
    if not (isinstance(fact, ast.Subscript) and isinstance(fact.slice, ast.Constant)):
        return True
    values = facts.get(str(fact.slice.value))
    if values is None:
        return True
    if isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant):
        return test.comparators[0].value in values
    return any(values)
