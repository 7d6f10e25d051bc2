"""Filters such as `split == "test" and year > 1950`, parsed into Arrow expressions.

The text is parsed as a Python expression of which only names, constants, comparisons, `and`, `or`,
`not`, `in` and a few functions are accepted. Nothing is executed.
"""

from __future__ import annotations

import ast
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line

MAX_CHARACTERS = 10_000
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "__eq__",
    ast.NotEq: "__ne__",
    ast.Lt: "__lt__",
    ast.LtE: "__le__",
    ast.Gt: "__gt__",
    ast.GtE: "__ge__",
}
FUNCTIONS = {
    "contains": pc.match_substring,
    "starts_with": pc.starts_with,
    "ends_with": pc.ends_with,
}
GRAMMAR = (
    'comparisons (== != < <= > >=), in ["a", "b"], is None, and, or, not, contains(column, "x"),'
    ' starts_with, ends_with; column("a name") for a name with spaces'
)


class Where:
    """A filter: its text, the Arrow expression, and the names of the columns that it reads."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns: list[str] = []
        self._numeric: set[str] = set()  # those that are compared with numbers
        if len(text) > MAX_CHARACTERS:
            raise FusionZooError(f"--where has {len(text):,} characters; at most {MAX_CHARACTERS}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
            self.expression: pc.Expression = self._condition(tree.body)
        except FusionZooError:
            raise
        except (SyntaxError, RecursionError, MemoryError, ValueError, TypeError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else one_line(error)
            raise FusionZooError(f"--where {text!r} cannot be read: {reason}. {GRAMMAR}") from None

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table for which the condition holds.

        Text that is compared with numbers is read as numbers: tables of data hold text.
        """
        try:
            typed = table
            for name in self._numeric:
                field = table.schema.field(name)
                if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
                    empty = pc.equal(table[name], "")
                    values = pc.if_else(empty, pa.scalar(None, field.type), table[name])
                    place = table.column_names.index(name)
                    typed = typed.set_column(place, name, values.cast(pa.float64()))
            return typed.filter(self.expression)
        except (pa.ArrowException, TypeError) as error:
            types = ", ".join(f"{name} is {table.schema.field(name).type}" for name in self.columns)
            raise FusionZooError(
                f"--where {self.text!r} does not fit the columns ({types}): {one_line(error)}"
            ) from None

    def _condition(self, node: ast.expr) -> pc.Expression:
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(value) for value in node.values]
            joined = parts[0]
            for part in parts[1:]:
                joined = joined & part if isinstance(node.op, ast.And) else joined | part
            return joined
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._condition(node.operand)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in FUNCTIONS:
            return self._function(node)
        if self._column_name(node) is not None:
            return self._value(node)  # a column of true and false
        raise self._refusal(node)

    def _comparison(self, node: ast.Compare) -> pc.Expression:
        left, joined = node.left, None
        for operator, right in zip(node.ops, node.comparators, strict=True):
            part = self._compare(left, operator, right)
            joined = part if joined is None else joined & part
            left = right
        return joined

    def _compare(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> pc.Expression:
        name = self._column_name(left) or self._column_name(right)
        if name is not None and any(map(_is_number, (left, right))):
            self._numeric.add(name)
        if isinstance(operator, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._refusal(right)
            is_null = self._value(left).is_null()
            return is_null if isinstance(operator, ast.Is) else ~is_null
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self._refusal(right)
            values = [self._constant(item) for item in right.elts]
            is_in = self._value(left).isin(pa.array(values))
            return is_in if isinstance(operator, ast.In) else ~is_in
        return getattr(self._value(left), COMPARISONS[type(operator)])(self._value(right))

    def _function(self, node: ast.Call) -> pc.Expression:
        assert isinstance(node.func, ast.Name)
        if len(node.args) != 2 or node.keywords:
            raise self._refusal(node)
        pattern = self._constant(node.args[1])
        if not isinstance(pattern, str):
            raise self._refusal(node.args[1])
        return FUNCTIONS[node.func.id](self._value(node.args[0]), pattern)

    def _value(self, node: ast.expr) -> pc.Expression:
        name = self._column_name(node)
        if name is None:
            return pc.scalar(self._constant(node))
        if name not in self.columns:
            self.columns.append(name)
        return pc.field(name)

    def _column_name(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return node.id
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "column"
        if isinstance(node, ast.Call) and is_call and len(node.args) == 1 and not node.keywords:
            name = self._constant(node.args[0])
            return name if isinstance(name, str) else None
        return None

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool):
            return node.value
        raise self._refusal(node)

    def _refusal(self, node: ast.expr) -> FusionZooError:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return FusionZooError(f"--where: {part!r} is not understood; a condition has {GRAMMAR}")


def _is_number(node: ast.expr) -> bool:
    """Whether a node is a number, or a list of numbers."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return bool(node.elts) and all(map(_is_number, node.elts))
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return is_number and not isinstance(getattr(node, "value", None), bool)
