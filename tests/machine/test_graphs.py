"""Forward passes hold nothing that a graph would freeze at the sizes it was traced with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from fusionzoo.machine.graphs import difference, export_program

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "fusion").rglob("*.py"), *(ROOT / "encoders").glob("*.py")])
NO_GRAPH = {  # functions that no graph reaches
    *("__init__", "__call__", "collate"),  # building, and processors in the loader's workers
    *("ranking", "evidential_loss", "_above_budget", "hardness"),  # losses
    *("prepare", "assign_folds", "_stratified_folds"),  # before training
    "run_by_length",  # has another way for graphs
    "straight_through",  # the width is a number of experts
}
MAKES_ONE = {"torch.cat", "torch.stack", "self.present", "self.normalise"}
METHODS = {"flatten", "unbind", "float", "to", "any", "all", "sum", "mean", "nonzero", "clone"}


def frozen_sizes(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield function, line and source of each `len(tensor)` and `one_hot(..., x.shape[...])`."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name in NO_GRAPH:
            continue
        tensors = tensors_of(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            is_length = name == "len" and is_tensor(node.args[0], tensors)
            is_width = name.endswith("one_hot") and any(
                ".shape" in ast.unparse(x) for x in node.args
            )
            if is_length or is_width:
                yield function.name, node.lineno, ast.unparse(node)


def tensors_of(function: ast.FunctionDef) -> set[str]:
    """Return the names in a function that hold tensors: annotated so, or computed from those."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    hold_tensors = ("Tensor", "Mapping[str, Tensor]")
    names = {x.arg for x in arguments if x.annotation and ast.unparse(x.annotation) in hold_tensors}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name for x in targets for name in bound(x, node.value, names)}
    return names


def bound(target: ast.expr, value: ast.expr | None, tensors: set[str]) -> Iterator[str]:
    """Yield the names that an assignment gives to tensors."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its_value in zip(target.elts, value.elts, strict=True):
            yield from bound(one, its_value, tensors)
    elif isinstance(target, ast.Name) and value is not None and is_tensor(value, tensors):
        yield target.id


def is_tensor(node: ast.expr, tensors: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in tensors
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of_tensor = node.func.attr in METHODS - {"unbind"} and is_tensor(node.func.value, tensors)
        makes_one = ast.unparse(node.func) in MAKES_ONE
        return of_tensor or makes_one
    if isinstance(node, ast.Attribute):
        return node.attr == "last_hidden_state"  # of a model of transformers
    if isinstance(node, ast.BinOp):
        return is_tensor(node.left, tensors) or is_tensor(node.right, tensors)
    return isinstance(node, ast.Subscript) and is_tensor(node.value, tensors)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_forward_pass_freezes_a_size(path: Path) -> None:
    """`x.shape[0]` stays a symbol in a graph, where `len(x)` becomes a number."""
    place = path.relative_to(ROOT).as_posix()
    found = list(frozen_sizes(path.read_text(encoding="utf-8")))
    assert found == [], f"{place}: write x.shape[0], and compare with torch.arange for one_hot"


@pytest.mark.parametrize(
    "line",
    [
        "y = len(x)",
        "y = torch.cat([x, x])\n    z = len(y)",
        "y = F.one_hot(x, x.shape[1])",
        "z = len(x[:, 0].float())",
        "z = len(inputs['pixels'])",
        "y = self.normalise(inputs['pixels'])\n    z = len(y)",
        "y, hidden = 1, self.net(x).last_hidden_state\n    z = len(hidden)",
    ],
)
def test_the_search_finds_what_freezes_a_size(line: str) -> None:
    arguments = "self, x: Tensor, inputs: Mapping[str, Tensor]"
    assert list(frozen_sizes(f"def forward({arguments}) -> Tensor:\n    {line}\n"))


class FirstRow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.arange(x.shape[0])[:, None]


def test_a_graph_keeps_its_named_sizes_free() -> None:
    module = FirstRow()
    program = export_program(module, (torch.ones(4, 3),), ({0: Dim("batch", min=1)},))
    for rows in (1, 2, 9):
        x = torch.randn(rows, 3)
        assert difference([program.module()(x)], [module(x)]) == 0


def test_a_difference_is_relative_to_large_values_and_sees_nan_and_shapes() -> None:
    assert difference([torch.tensor([1000.1])], [torch.tensor([1000.0])]) == pytest.approx(
        1e-4, 0.1
    )
    assert difference([torch.tensor([0.1])], [torch.tensor([0.0])]) == pytest.approx(0.1)
    assert difference([torch.tensor([float("nan")])], [torch.tensor([0.0])]) == float("inf")
    assert difference([torch.ones(2)], [torch.ones(3)]) == float("inf")
