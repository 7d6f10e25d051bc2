"""The one error that a user can cause, and the helpers that word it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FusionZooError(ValueError):
    """Something a user can mend: the message says what was found, what was expected, what to do.

    A loader's worker hands on the whole traceback as the message: of that the last one is kept.
    """

    def __init__(self, message: str) -> None:
        if message.startswith("Caught FusionZooError in DataLoader worker"):
            message = message.rpartition("FusionZooError: ")[2].strip()
        super().__init__(message)


def one_line(error: BaseException) -> str:
    """Return the message of an error of another library on one line.

    >>> one_line(ValueError("no\\n  key"))
    'no key'
    """
    return " ".join(str(error).split())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known word, or nothing.

    >>> did_you_mean("gmv", ["gmu", "lmf"])
    " Did you mean 'gmu'?"
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
