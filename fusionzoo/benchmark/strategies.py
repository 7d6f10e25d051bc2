"""The strategies of a benchmark: fusions and single modalities, by name, and their settings."""

from __future__ import annotations

from collections.abc import Sequence

from fusionzoo.config import BenchmarkConfig
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.fusion import FUSIONS, fusion_info, list_fusions
from fusionzoo.zoo.cards import FAMILIES

from .bench import Bench, Settings

ALONE = "alone:"  # prefix of the strategies that see one modality


def select_fusions(names: str | Sequence[str], num_modalities: int) -> list[str]:
    """Resolve names of fusions and families, `"mbt,late"` or a list; an unknown one is an error."""
    words = names.split(",") if isinstance(names, str) else list(names)
    fusions: list[str] = []
    for word in (word.strip() for word in words):
        if word == "all" or word in FAMILIES:
            family = list_fusions(None if word == "all" else word)
            fusions += [name for name in family if fusion_info(name).at_least <= num_modalities]
        elif word not in FUSIONS:
            hint = did_you_mean(word, [*list_fusions(), *FAMILIES, "all"])
            raise FusionZooError(f"unknown fusion {word!r}.{hint} `fusionzoo zoo` lists all.")
        else:
            fusions.append(word)
    for name in fusions:
        least = fusion_info(name).at_least
        if least > num_modalities:
            raise FusionZooError(f"{name} needs {least} modalities; the data has {num_modalities}")
    return list(dict.fromkeys(fusions))


def settings_of(cfg: BenchmarkConfig, strategy: str) -> Settings:
    """Merge the common settings that a strategy's fusion has with those of the strategy itself."""
    name = fusion_of(strategy)
    known = {"dim", *fusion_info(name).parameters}
    common = {key: value for key, value in cfg.fusion.items() if key in known}
    if strategy.startswith(ALONE):
        common["hidden"] = ()  # a linear head: the strongest probe of one encoder that we measured
    specific = dict(cfg.settings.get(strategy, {}))
    for key in specific:
        if key not in known:
            raise FusionZooError(
                f"--settings.{strategy}.{key}: {name} has no such setting."
                f"{did_you_mean(key, known)} It has: {', '.join(sorted(known))}."
            )
    return common | specific


def check_settings(cfg: BenchmarkConfig, strategies: Sequence[str]) -> None:
    """Raise an error for a setting that no strategy has, before anything is computed."""
    for name in cfg.settings:
        if name not in FUSIONS and not name.startswith(ALONE):
            raise FusionZooError(
                f"--settings.{name}: unknown fusion{did_you_mean(name, strategies)}"
            )
    for key in cfg.fusion:
        names = [*list_fusions(), *map(fusion_of, strategies)]
        if not any(key in {"dim", *fusion_info(n).parameters} for n in names):
            raise FusionZooError(f"--fusion.{key}: no fusion has this setting")
    for name in strategies:
        settings_of(cfg, name)
    optim = cfg.optim
    if "plateau" in (optim.schedule, *optim.modality_schedule.values()):
        raise FusionZooError("--optim.schedule plateau: here seeds share a rate; choose another")
    for key in ("unfreeze_at_epoch", "gradual_unfreeze"):
        if getattr(optim, key):
            raise FusionZooError(f"--optim.{key} is a setting of train.py; benchmark.py has none")


def modalities_of(bench: Bench, strategy: str) -> list[str]:
    """Return the modalities that a strategy sees."""
    if strategy.startswith(ALONE):
        return [strategy.removeprefix(ALONE)]
    return list(bench.modalities)


def fusion_of(strategy: str) -> str:
    """Return the fusion of a strategy; a single modality goes through `concat`."""
    return "concat" if strategy.startswith(ALONE) else strategy


def reads_tokens(strategy: str) -> bool:
    """Whether a strategy reads tokens, or pooled vectors only."""
    return fusion_info(fusion_of(strategy)).reads == "tokens"
