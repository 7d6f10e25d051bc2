"""`python -m fusionzoo` is the console command `fusionzoo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from .cli import main
from .machine.processes import exit_process


class PandasLater(MetaPathFinder):
    """Keep pyarrow from importing pandas, 0.4 s of CPU, to see whether our lists are its Series.

    pyarrow looks once, at the first value that it converts. If anything else imports pandas later,
    as a plugin may, pyarrow is made to look again. fusionzoo itself imports no pandas in commands.
    """

    def __init__(self) -> None:
        self.was_hidden = self.is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "pandas" or self.is_searching:
            return None
        if _importer() in ("fusionzoo", "pyarrow"):
            self.was_hidden = True
            raise ModuleNotFoundError("pandas is not needed here", name=name)
        self.is_searching = True
        spec = find_spec(name)
        self.is_searching = False
        if self.was_hidden and spec is not None and spec.loader is not None:
            spec.loader.exec_module = _executes(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _importer() -> str:
    """Return the package whose code, or a C extension that it called, is importing."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("importlib") and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _executes(execute: Any) -> Any:
    def exec_module(module: ModuleType) -> None:
        import pyarrow as pa

        execute(module)
        pa.table({}).to_pandas()  # here pyarrow looks again

    return exec_module


def run() -> NoReturn:
    """Run the command line and end this process, under torchrun also."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, PandasLater())
    exit_process(main())


if __name__ == "__main__":
    run()
