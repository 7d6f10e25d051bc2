"""Training strategies that balance modalities, one file each; they wrap any fusion.

`python train.py --balance ogm_ge,modality_dropout --balance_settings.ogm_ge.alpha 0.5`
"""

from __future__ import annotations

from fusionzoo.registry import import_siblings

from .base import (
    BALANCE,
    START,
    Balance,
    Now,
    Seen,
    Setting,
    Term,
    build_balance,
    pooled_of,
    widened,
)

__all__ = [
    "BALANCE",
    "START",
    "Balance",
    "Now",
    "Seen",
    "Setting",
    "Term",
    "build_balance",
    "pooled_of",
    "widened",
]

import_siblings(__path__, __name__)  # what registers strategies
