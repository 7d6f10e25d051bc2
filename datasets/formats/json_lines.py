"""JSON lines: one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError, one_line

from ..row_numbers import RowNumbers
from .checked import check_depth
from .text_files import is_gzip, open_text, open_utf8, read_in_blocks

TYPES = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list"}


def read_json_lines(path: Path, encoding: str) -> tuple[pa.Table, RowNumbers]:
    """Read a file; return its columns and the numbers of its rows. Text stays text, dates too."""
    with _open_lines(path, encoding) as lines:
        check_depth(lines, str(path))
    try:
        table = read_in_blocks(partial(_read, path, encoding, pa.schema([])))
        dates = [field for field in table.schema if field.type != _without_dates(field.type)]
        if dates:
            schema = pa.schema([pa.field(x.name, _without_dates(x.type)) for x in dates])
            table = read_in_blocks(partial(_read, path, encoding, schema))
    except pa.ArrowInvalid as error:
        raise _describe(path, encoding, error) from error
    return table, RowNumbers(read=partial(_row_numbers, path, encoding))


def _read(path: Path, encoding: str, schema: pa.Schema, block: int) -> pa.Table:
    import pyarrow.json as pj

    parse = pj.ParseOptions(explicit_schema=schema)
    with open_utf8(path, encoding) as stream:
        return pj.read_json(
            stream, read_options=pj.ReadOptions(block_size=block), parse_options=parse
        )


@contextmanager
def _open_lines(path: Path, encoding: str) -> Iterator[Iterable[bytes]]:
    """Open a file as lines of UTF-8."""
    if encoding == "utf-8" and not is_gzip(path):
        with path.open("rb") as file:
            yield file
    else:
        with open_text(path, encoding) as text:
            yield (line.encode("utf-8", "replace") for line in text)


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """Return a type with text where pyarrow takes text for dates."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(x.name, _without_dates(x.type)) for x in kind])
    return kind


def _row_numbers(path: Path, encoding: str) -> list[int]:
    """Return the numbers of the lines that are not blank."""
    with open_text(path, encoding) as file:
        return [number for number, line in enumerate(file, start=1) if line.strip()]


def _describe(path: Path, encoding: str, error: pa.ArrowInvalid) -> FusionZooError:
    """Return the error of a file that cannot be parsed, with its first bad row."""
    first: dict[str, str] = {}  # column -> type of its first value
    with open_text(path, encoding) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as problem:
                problem_in_line = getattr(problem, "msg", one_line(problem))
                reason = f"is not JSON: {problem_in_line}; each line holds one object"
                return FusionZooError(f"{path}, row {number} {reason}")
            if not isinstance(row, dict):
                return FusionZooError(f"{path}, row {number} is no object {{...}}")
            for name, value in row.items():
                kind = _type_name(value)
                if value is not None and first.setdefault(name, kind) != kind:
                    return FusionZooError(
                        f"{path}, row {number}, column {name!r}: {kind}, but {first[name]} in rows"
                        " before; write all values of a column in the same way"
                    )
    if not first:
        return FusionZooError(f"{path} is empty")
    return FusionZooError(f"{path} cannot be read: {one_line(error)}")


def _type_name(value: Any) -> str:
    return TYPES.get(type(value), "an object")
