"""Columns `start` and `end`, in seconds: which part of a sample's clip or video is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from ..arrow import first_true
from ..stretch import VIDEOS
from .cell_columns import Roles
from .columns import Columns

EDGES = ("start", "end")


def split_roles(columns: Roles, kinds: Mapping[str, str]) -> tuple[Roles, dict[str, str]]:
    """Return the roles without those of segments (`start`, `audio_end`), and these."""
    segments = {}
    for role, column in columns.items():
        is_edge = role in EDGES or role.endswith(tuple(f"_{edge}" for edge in EDGES))
        if is_edge and role not in kinds:
            if not isinstance(column, str):
                raise FusionZooError(f"--data.columns.{role} takes one column, found {column}")
            segments[role] = column
    return {role: name for role, name in columns.items() if role not in segments}, segments


def read_segments(
    table: Columns,
    kinds: Mapping[str, str],
    values: Mapping[str, Any],
    roles: Mapping[str, str],
    taken: Collection[int],
) -> tuple[dict[str, Any], list[str]]:
    """Return columns `<modality>_start` and `<modality>_end`, float64, and notes of them.

    For a modality `audio` the column is that of the role `audio_start`, else that of `start`. A
    column that only has the name, and neither numbers nor clips beside it, stays unused; `taken`
    are the positions of columns that are something else.
    """
    columns: dict[str, Any] = {}
    notes = []
    for role in roles:
        table.require(roles[role], f"--data.columns.{role}")
    for name, kind in kinds.items():
        named = any(f"{name}_{edge}" in roles or f"{name}_{edge}" in table for edge in EDGES)
        if kind == "audio" or (kind == "image" and (named or _has_videos(values[name]))):
            edges = {edge: _read_edge(table, name, edge, roles, taken) for edge in EDGES}
            known = {edge: x for edge, x in edges.items() if x is not None}
            if known:
                _check(table, name, {edge: x for edge, (x, _) in known.items()})
                names = " and ".join(repr(column) for _, column in known.values())
                notes.append(f"segments of {name} by {names}, in seconds")
            columns |= {f"{name}_{edge}": x for edge, (x, _) in known.items()}
    lost = [role for role in roles if not any(role in (x, x.rpartition("_")[2]) for x in columns)]
    if lost:
        raise FusionZooError(
            f"{table.source}: --data.columns.{lost[0]} names a column of segments, and there are"
            " neither clips nor videos that it is for"
        )
    return columns, notes


def _has_videos(column: Any) -> bool:
    """Whether any cell names a video; of values outside of the table that is not known."""
    if pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    if not pa.types.is_string(column.type):
        return False
    pattern = rf"(?i)\.({'|'.join(suffix[1:] for suffix in sorted(VIDEOS))})$"
    return bool(pc.any(pc.match_substring_regex(column, pattern)).as_py())


def _read_edge(
    table: Columns, name: str, edge: str, roles: Mapping[str, str], taken: Collection[int]
) -> tuple[Any, str] | None:
    """Return the seconds and the column of one edge; None if there is no such column."""
    for role in (f"{name}_{edge}", edge):
        column = roles.get(role, role)
        if column not in table or table.position(column) in taken:
            continue
        used = set(table.used)
        text = table.numbers(column)
        try:
            return text.cast(pa.float64()), table.name(column)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if role in roles or role != edge:
                row, cell = _first_word(text)
                raise FusionZooError(
                    f"{table.where(row)}: {table.name(column)} is {cell!r}, no number of seconds"
                ) from None
            table.used = used
    return None


def _first_word(column: Any) -> tuple[int, str]:
    """Return row and text of the first cell that is no number."""
    for row, cell in enumerate(column.to_pylist()):
        try:
            float(cell or 0)
        except ValueError:
            return row, cell
    return 0, str(column[0])


def _check(table: Columns, name: str, seconds: Mapping[str, Any]) -> None:
    """Raise an error for the first segment that is negative, not finite or empty."""
    unknown = np.full(len(table.table), np.nan)
    starts, ends = (
        seconds[edge].to_numpy(zero_copy_only=False) if edge in seconds else unknown
        for edge in EDGES
    )
    bad = (starts < 0) | (ends <= np.nan_to_num(starts)) | np.isinf(starts) | np.isinf(ends)
    row = first_true(pa.chunked_array([pa.array(bad)]))
    if row is not None:
        raise FusionZooError(
            f"{table.where(row)}: the segment of {name} from {starts[row]:g} s to {ends[row]:g} s:"
            " a start is at least 0, and an end is after it (rename the columns if they are"
            " something else)"
        )
