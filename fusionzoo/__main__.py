"""`python -m fusionzoo` is the console command `fusionzoo`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from .cli import main
from .machine.processes import exit_process

UTILS = "torch._dynamo.utils"
# Modules that import from there, or mark functions by `torch.compiler.disable`.
MARKING = ("torchvision.ops.roi_align", "torchvision.tv_tensors", "timm.layers.typing")


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


class CompilerLater(MetaPathFinder):
    """Keep torchvision and timm from importing torch's compiler, 1.1 s of CPU.

    They import one function of it, and mark functions that it must not compile. It is imported when
    such a function is called, or a model compiled.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_early = name in MARKING and UTILS not in sys.modules
        return _wrapped(_without_compiler, name, path) if is_early else None


class CollectLater(MetaPathFinder):
    """Turn the garbage collector off during imports: what these make stays, and looking through it
    again with each further import takes 0.2 to 0.8 s of CPU."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Off already within such an import.
        return _wrapped(_uncollected, name, path) if gc.isenabled() else None


def _wrapped(
    around: Callable[[], ContextDecorator], name: str, path: Sequence[str] | None
) -> ModuleSpec | None:
    """Return the spec of a module that will be executed within `around`."""
    spec = PathFinder.find_spec(name, path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module = around()(spec.loader.exec_module)  # type: ignore
    return spec


@contextmanager
def _without_compiler() -> Iterator[None]:
    import torch.compiler
    from torch._compile import _disable_dynamo

    def is_compile_supported(device: Any) -> Any:
        return import_module(UTILS).is_compile_supported(device)

    def disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        return _disable_dynamo(function, recursive)  # imports it when the function is called

    sys.modules[UTILS] = stand_in = ModuleType(UTILS)
    vars(stand_in)["is_compile_supported"] = is_compile_supported
    names, at_once = vars(torch.compiler), torch.compiler.disable
    names["disable"] = disable
    try:
        yield
    finally:
        names["disable"] = at_once
        del sys.modules[UTILS]


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # all that there is now counts as old, and is seldom looked through
        gc.enable()


def run() -> NoReturn:
    """Run the command line and end this process, under torchrun also."""
    sys.meta_path[:0] = CompilerLater(), CollectLater()
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, PandasLater())
    exit_process(main())


if __name__ == "__main__":
    run()
