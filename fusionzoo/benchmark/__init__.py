"""Compare fusions on frozen features or end to end; benchmark.py is the script.

The package is also a function: `fusionzoo.benchmark(data, fusions=["gmu", "mbt"])` calls
`api.benchmark`, under the same name whether or not a module of the package is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module that can be called; what it calls is imported then, as `fusionzoo` does."""

    def __call__(
        self,
        data: Any = None,
        *,
        fusions: str | Sequence[str] | None = None,
        seeds: int | None = None,
        out: str | PathLike[str] | None = None,
        config: Any = None,
        **settings: Any,
    ) -> Any:
        """Compare fusions on a data set; see `fusionzoo.benchmark.api.benchmark`."""
        benchmark = import_module(f"{__name__}.api").benchmark
        return benchmark(data, fusions=fusions, seeds=seeds, out=out, config=config, **settings)


sys.modules[__name__].__class__ = _CallableModule
