"""Errors of other libraries with the name of what was read, and names that are not known."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

MAX_NAMES = 30  # shown in a message


@contextmanager
def problems(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds, by default all, as `what` and their message on one line."""
    kinds = kinds or (Exception,)
    try:
        yield
    except FusionZooError:
        raise
    except kinds as error:
        raise FusionZooError(f"{what}: {one_line(error)}") from error


def check_name(name: str, known: Collection[str], problem: str) -> None:
    """Raise the problem with the nearest known name and all of them, if a name is not known."""
    if name not in known:
        raise FusionZooError(f"{problem}.{did_you_mean(name, known)} It has: {list_names(known)}")


def list_names(names: Collection[str]) -> str:
    """Return names for a message, the first thirty of many.

    >>> list_names(["a", "b"])
    'a, b'
    """
    shown = ", ".join(name[:100] for name in [*names][:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else "")
