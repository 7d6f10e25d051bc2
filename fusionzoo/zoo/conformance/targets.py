"""What `fusionzoo zoo check` is asked to check: a registered name, or somebody's own code."""

from __future__ import annotations

from typing import Any

from fusionzoo.plugins import import_class, is_reference
from fusionzoo.registry import Registry


def find(target: str, registry: Registry[Any, Any]) -> Any:
    """Return the class or function of a registered name, `module:Class` or `file.py:Class`."""
    return import_class(target) if is_reference(target) else registry[target].cls
