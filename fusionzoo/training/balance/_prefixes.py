"""Sizes of prefixes of a vector, as `--matryoshka` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusionzoo.config import RunConfig
from fusionzoo.errors import FusionZooError


def prefix_sizes(setting: str | int | Sequence[int], flag: str = "--matryoshka") -> list[int]:
    """Read sizes of prefixes.

    >>> prefix_sizes("128, 64")
    [64, 128]
    """
    words: list[Any] = setting.split(",") if isinstance(setting, str) else []
    words = words or ([setting] if isinstance(setting, int) else list(setting))
    try:
        sizes = sorted({int(word) for word in words if str(word).strip()})
    except ValueError:
        raise FusionZooError(f"{flag} {setting!r}: expected sizes such as 64,128,256") from None
    if sizes and sizes[0] < 1:
        raise FusionZooError(f"{flag} {sizes[0]}: a size is at least 1")
    return sizes


def with_matryoshka(
    cfg: RunConfig, has_target: bool
) -> tuple[str | Sequence[str], Mapping[str, Mapping[str, Any]]]:
    """Return the training strategies and their settings, with those of `--matryoshka`.

    Without a target, only the vectors that `contrastive_align` aligns are trained.
    """
    sizes = prefix_sizes(cfg.matryoshka)
    if not sizes:
        return cfg.balance, cfg.balance_settings
    listed = cfg.balance.split(",") if isinstance(cfg.balance, str) else cfg.balance
    names = [name.strip() for name in listed if name.strip()]
    added = {"contrastive_align": {"prefixes": sizes}} if "contrastive_align" in names else {}
    if has_target:
        names = [*names, *({"matryoshka"} - {*names})]
        added["matryoshka"] = {"sizes": sizes}
    settings = {
        name: {**added.get(name, {}), **cfg.balance_settings.get(name, {})}
        for name in {**cfg.balance_settings, **added}
    }
    return names, settings
