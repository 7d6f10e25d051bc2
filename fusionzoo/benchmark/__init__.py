"""Compare fusions on frozen features or end to end; benchmark.py is the script.

The package is also a function: `fusionzoo.benchmark(data, fusions=["gmu", "mbt"])` calls
`api.benchmark`, under the same name whether or not a module of the package is imported already.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from fusionzoo.config import BenchmarkConfig

    from .report.report import Report


class _CallableModule(ModuleType):
    """A module that can be called."""

    def __call__(
        self,
        data: Any = None,
        *,
        fusions: str | Sequence[str] | None = None,
        seeds: int | None = None,
        out: str | os.PathLike[str] | None = None,
        config: BenchmarkConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Report:
        """Compare fusions on a data set; see `fusionzoo.benchmark.api.benchmark`."""
        from .api import benchmark

        return benchmark(data, fusions=fusions, seeds=seeds, out=out, config=config, **settings)


sys.modules[__name__].__class__ = _CallableModule
