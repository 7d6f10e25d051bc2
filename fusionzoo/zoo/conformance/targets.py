"""What `fusionzoo zoo check` is asked to check: a registered name, or somebody's own code."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.registry import Registry

PACKAGE = "fusionzoo_checked"  # what files are imported into


def is_import(target: str) -> bool:
    """Whether a target is to be imported, and no registered name.

    >>> [is_import(x) for x in ("gmu", "hf/pkg:a-b/model", "my.module:Mine", "dir/my.py:Mine")]
    [False, False, True, True]
    """
    return re.fullmatch(r"([\w.]+|.*\.py):\w+", target) is not None


def resolve(target: str) -> Any:
    """Import `module:Name` or `path/to/file.py:Name`."""
    place, _, name = target.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import(place)
        return getattr(module, name)
    except FusionZooError:
        raise
    except Exception as error:  # whatever the module raises while it is imported
        raise FusionZooError(f"cannot import {target}: {one_line(error)}") from error


def find(target: str, registry: Registry[Any]) -> Any:
    """Return the class or function of a registered name, or import it."""
    return resolve(target) if is_import(target) else registry[target].cls


def _import(name: str) -> ModuleType:
    """Import a module; the working folder comes first."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _import_file(path: Path) -> ModuleType:
    """Import a file once; what it registers is named after the file."""
    name = f"{PACKAGE}.{path.stem}"
    module = sys.modules.get(name)
    if module is not None and module.__file__ == str(path.resolve()):
        return module
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise FusionZooError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    # Known to `sys.modules`, so that objects of its classes can be pickled.
    sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
