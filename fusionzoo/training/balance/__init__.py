"""Training strategies that balance modalities, one file each; they wrap any fusion.

`python train.py --balance ogm_ge,modality_dropout --balance_settings.ogm_ge.alpha 0.5`
"""

from __future__ import annotations

from fusionzoo.ground.registry import import_siblings

from .base import (
    BALANCE,
    Balance,
    LossTerm,
    MeanLoss,
    RunningTrainer,
    StrategyInputs,
    at_least_float32,
    build_balance,
    listed_strategies,
    pooled_of,
)

__all__ = [
    "BALANCE",
    "Balance",
    "LossTerm",
    "MeanLoss",
    "RunningTrainer",
    "StrategyInputs",
    "at_least_float32",
    "build_balance",
    "listed_strategies",
    "pooled_of",
]

import_siblings(__path__, __name__)  # what registers strategies
