"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import fusionzoo


def has_examples(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return ">>> " in Path(spec.origin).read_text(encoding="utf-8")


NAMES = [
    pytest.param(info.name, marks=pytest.mark.needs("fastapi"))
    if info.name.startswith("fusionzoo.tools.serve.")
    else info.name
    for info in pkgutil.walk_packages(fusionzoo.__path__, "fusionzoo.")
    if has_examples(info.name)
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
