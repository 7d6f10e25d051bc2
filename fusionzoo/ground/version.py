"""The version, which the package, saved models and reports name."""

from __future__ import annotations

__version__ = "0.1.0"
