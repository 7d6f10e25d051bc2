"""Read the docstrings of components: their sections, and the meaning of each setting."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from textwrap import dedent
from typing import Any

SECTIONS = ("Missing", "Pitfall", "Use when", "Settings", "Shapes")


def sections(text: str) -> dict[str, str]:
    """Split a docstring; the text between the first line and the first section has the key "".

    >>> sections("Do it.\\n\\ny = x\\n\\nMissing: 0.\\nPitfall: none\\nknown.")["Pitfall"]
    'none known.'
    """
    titles = "|".join(SECTIONS)
    body = text.partition("\n")[2].strip()
    equation, *rest = re.split(rf"^({titles}):\s*", body, flags=re.MULTILINE)
    by_title = dict.fromkeys(("", *SECTIONS), "") | {"": " ".join(equation.split())}
    for title, words in zip(rest[::2], rest[1::2], strict=True):
        by_title[title] = " ".join(words.split())
    return by_title


def settings_block(docstring: str | None) -> dict[str, str]:
    """Return the meaning of each setting in a docstring's `Settings:` block.

    Each line of the block is `name: meaning`; further lines of a meaning are indented deeper.

    >>> settings_block("Add.\\n\\nSettings:\\n  rank: terms,\\n    1 or more\\n  k: factors")
    {'rank': 'terms, 1 or more', 'k': 'factors'}
    """
    text = inspect.cleandoc(docstring or "")
    block = re.search(r"^Settings:\n((?: +.*\n?|\n)*)", text, flags=re.MULTILINE)
    meanings: dict[str, str] = {}
    name = ""
    for line in dedent(block[1]).splitlines() if block else ():
        if match := re.match(r"(\w+): +(.+)", line):
            name, meanings[match[1]] = match[1], match[2]
        elif name and line:
            meanings[name] += f" {line.strip()}"
    return meanings


def described_settings(component: Callable[..., Any]) -> dict[str, str]:
    """Return the meaning of each setting of a class or function.

    Base classes are included, so that settings common to several classes are described once, in
    the docstring of their base class.
    """
    classes = component.__mro__ if isinstance(component, type) else (component,)
    meanings: dict[str, str] = {}
    for cls in reversed(classes):
        meanings |= settings_block(cls.__doc__)
    return meanings
