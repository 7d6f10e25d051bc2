"""Check tables of any format: nesting, text that is not Unicode, and names in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, one_line

MAX_DEPTH = 64  # of lists and objects in a row of JSON; Arrow's parser crashes from about 10,000
MAX_NAMES = 30  # shown in a message
OPENING, CLOSING = b"[{", b"]}"


def check_depth(lines: Iterable[bytes], source: str) -> None:
    """Raise an error for a row of JSON lines that is nested too deeply.

    Brackets inside of text count too, so only rows with many open ones at once are refused.
    """
    for row, line in enumerate(lines, start=1):
        if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
            continue
        letters = np.frombuffer(line, np.uint8)
        opened = np.isin(letters, np.frombuffer(OPENING, np.uint8))
        closed = np.isin(letters, np.frombuffer(CLOSING, np.uint8))
        depth = int((opened.astype(np.int32) - closed).cumsum(dtype=np.int32).max())
        if depth > MAX_DEPTH and _is_nested(line):
            raise FusionZooError(
                f"{source}, row {row}: its values are nested {depth} levels deep; at most"
                f" {MAX_DEPTH} are read"
            )


def _is_nested(line: bytes) -> bool:
    """Return whether brackets outside of text are nested too deeply."""
    depth, in_text, escaped = 0, False, False
    for letter in line:
        if in_text:
            in_text = escaped or letter != ord('"')
            escaped = not escaped and letter == ord("\\")
        elif letter == ord('"'):
            in_text = True
        else:
            depth += (letter in OPENING) - (letter in CLOSING)
        if depth > MAX_DEPTH:
            return True
    return False


def check_unicode(table: pa.Table, source: str) -> pa.Table:
    """Return a table whose names and texts are valid UTF-8, which Arrow's readers do not check."""
    try:
        names = table.column_names
    except UnicodeDecodeError as error:
        raise FusionZooError(
            f"{source}: the name of a column is not UTF-8: {one_line(error)}"
        ) from None
    for name, column in zip(names, table.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise FusionZooError(
                f"{source}, column {name!r} holds text that is not UTF-8 ({one_line(error)}): save"
                " the file as UTF-8"
            ) from None
    return table


def list_names(names: Sequence[str]) -> str:
    """Return names for a message, the first thirty of many.

    >>> list_names(["a", "b"])
    'a, b'
    """
    shown = ", ".join(name[:100] for name in names[:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else "")
