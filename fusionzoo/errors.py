"""The exception for users' errors, and helpers for its message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FusionZooError(ValueError):
    """An error that the user can fix: the message says what was found, expected, and to do.

    From a DataLoader worker the message is a whole traceback, which is reduced to its last message.
    """

    def __init__(self, message: str) -> None:
        if message.startswith("Caught FusionZooError in DataLoader worker"):
            message = message.rpartition("FusionZooError: ")[2].strip()
        super().__init__(message)


def one_line(error: BaseException) -> str:
    """Return the message of another library's exception on one line.

    >>> one_line(ValueError("no\\n  key"))
    'no key'
    """
    return " ".join(str(error).split())


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known word, or nothing.

    >>> did_you_mean("gmv", ["gmu", "lmf"])
    " Did you mean 'gmu'?"
    """
    nearest = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
