"""Training strategies that balance modalities, one file each; they wrap any fusion.

`python train.py --balance ogm_ge,modality_dropout --balance_settings.ogm_ge.alpha 0.5`
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .base import BALANCE, START, Balance, Now, Seen, Setting, Term, build_balance

__all__ = ["BALANCE", "START", "Balance", "Now", "Seen", "Setting", "Term", "build_balance"]

for _found in iter_modules(__path__):
    if _found.name != "base" and not _found.name.startswith("_"):
        import_module(f".{_found.name}", __package__)
