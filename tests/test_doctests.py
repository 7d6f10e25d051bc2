"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fusionzoo

NAMES = [
    pytest.param(info.name, marks=pytest.mark.needs("fastapi"))
    if info.name.startswith("fusionzoo.tools.serve.")
    else info.name
    for info in pkgutil.walk_packages(fusionzoo.__path__, "fusionzoo.")
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
