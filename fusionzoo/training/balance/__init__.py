"""Training strategies that balance modalities, one file each; they wrap any fusion.

`python train.py --balance ogm_ge,modality_dropout --balance_settings.ogm_ge.alpha 0.5`
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .base import (
    BALANCE,
    Balance,
    LossTerm,
    RunningTrainer,
    StrategyInputs,
    build_balance,
)

__all__ = [
    "BALANCE",
    "Balance",
    "LossTerm",
    "RunningTrainer",
    "StrategyInputs",
    "build_balance",
]

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f".{_module.name}", __package__)
