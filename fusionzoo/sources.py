"""Where a component's class is defined: in fusionzoo, in a plugin's file, in a notebook."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PLUGINS = "fusionzoo.plugins"  # the package of the modules of plugin files


def source_of(cls: type) -> str | None:
    """Return what to import for a class, `my_file.py` or `my_package.my_module`; None: fusionzoo.

    Of a file the name alone, for a path says nothing on another machine.
    """
    package, _, name = cls.__module__.rpartition(".")
    if package.startswith(f"{PLUGINS}."):
        return f"{name}.py"
    return None if cls.__module__.partition(".")[0] == "fusionzoo" else cls.__module__


def definition_of(cls: Any) -> str:
    """Return where a class or function is defined: `fusionzoo.fusion.early.gmu:GMU`, or a file."""
    file = "" if source_of(cls) is None else file_of(sys.modules.get(cls.__module__))
    return f"{file or cls.__module__}:{cls.__qualname__}"


def file_of(module: ModuleType | None) -> str:
    """Return the path of a module's file; empty: it has none."""
    return getattr(module, "__dict__", {}).get("__file__") or ""


def code_digest(cls: Any) -> str | None:
    """Return a digest of the file that defines a plugin's class; None: the class is fusionzoo's.

    Results that are kept on disk depend on it, as they depend on fusionzoo's version.
    """
    return None if source_of(cls) is None else file_digest(cls)


def file_digest(defined: Any) -> str:
    """Hash the file of a class or module; empty: it has none, as in a notebook."""
    try:
        return hashlib.sha256(Path(inspect.getfile(defined)).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""
