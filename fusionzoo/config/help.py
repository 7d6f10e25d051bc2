"""The settings of a configuration as text, for `--help`."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def help_text(cls: type, prefix: str = "") -> str:
    """Return a line per setting: flag, default, meaning."""
    lines = []
    hints = get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            lines.append(help_text(hints[one.name], f"{prefix}{one.name}."))
        else:
            flag = f"--{prefix}{one.name}"
            says = one.metadata.get("help", "")
            lines.append(f"  {flag:<28} {_default(one)!s:<34} {says}".rstrip())
    return "\n".join(lines)


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return json.dumps(one.default_factory())
    return "null" if one.default is None else one.default
