"""Import torchvision and timm without torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

UTILS = "torch._dynamo.utils"


@contextmanager
def compiler_later(name: str) -> Iterator[None]:
    """Keep the first import of a module of torchvision or timm from importing torch's compiler.

    They take one function from it and mark others that it must not compile; the compiler is then
    imported when such a function is called, or a model compiled. Spares 2 s of CPU (torch 2.15).
    """
    if name in sys.modules or UTILS in sys.modules:
        yield
        return
    import torch.compiler
    from torch._compile import _disable_dynamo

    def disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        return _disable_dynamo(function, recursive)  # imports it when the function is called

    names, at_once = vars(torch.compiler), torch.compiler.disable
    names["disable"], sys.modules[UTILS] = disable, _Utils(UTILS)
    try:
        yield
    finally:
        names["disable"] = at_once
        if isinstance(sys.modules[UTILS], _Utils):
            del sys.modules[UTILS]


class _Utils(ModuleType):
    """`torch._dynamo.utils`, imported only if a block needs more of it than one function."""

    def is_compile_supported(self, device: Any) -> Any:
        """Call the function of that name."""
        return import_module(UTILS).is_compile_supported(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(UTILS) is self:
            del sys.modules[UTILS]
        return getattr(import_module(UTILS), name)
