"""The settings of a configuration as text, for `--help`."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def help_text(cls: type, prefix: str = "") -> str:
    """Return a line per setting: flag, default, meaning."""
    lines = []
    hints = get_type_hints(cls)
    for setting in fields(cls):
        if is_dataclass(hints[setting.name]):
            lines.append(help_text(hints[setting.name], f"{prefix}{setting.name}."))
        else:
            flag = f"--{prefix}{setting.name}"
            meaning = setting.metadata.get("help", "")
            lines.append(f"  {flag:<28} {_default(setting)!s:<34} {meaning}".rstrip())
    return "\n".join(lines)


def _default(setting: Field[Any]) -> Any:
    if setting.default_factory is not MISSING:
        return json.dumps(setting.default_factory())
    return "null" if setting.default is None else setting.default
