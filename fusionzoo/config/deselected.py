"""Drop settings of modalities that `--data.modalities` excludes, so that recipes stay usable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .schema import KEYED, BenchmarkConfig, RunConfig

C = TypeVar("C", RunConfig, BenchmarkConfig)


def drop_deselected(cfg: C, deselected: Sequence[str]) -> tuple[C, list[str]]:
    """Return `cfg` without the settings of deselected modalities, and the flags dropped."""
    flags: list[str] = []

    def prune(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
        flags.extend(f"--{section}.{name}" for name in settings if name in deselected)
        return {name: value for name, value in settings.items() if name not in deselected}

    changes: dict[str, Any] = {"encoders": prune(cfg.encoders, "encoders")}
    if isinstance(cfg.data.get("augment"), Mapping):
        changes["data"] = {**cfg.data, "augment": prune(cfg.data["augment"], "data.augment")}
    optim: dict[str, Any] = {key: prune(getattr(cfg.optim, key), f"optim.{key}") for key in KEYED}
    changes["optim"] = replace(cfg.optim, **optim)
    if isinstance(cfg, BenchmarkConfig):
        changes["max_tokens"] = prune(cfg.max_tokens, "max_tokens")
    else:
        changes["balance_settings"] = {
            strategy: {
                key: prune(value, f"balance_settings.{strategy}.{key}")
                if isinstance(value, Mapping)
                else value
                for key, value in settings.items()
            }
            for strategy, settings in cfg.balance_settings.items()
        }
    return replace(cfg, **changes), flags
