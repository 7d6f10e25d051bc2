"""Objectives, one file each, and several of them in one head (`multitask`)."""

from __future__ import annotations

from fusionzoo.registry import import_siblings

from .base import OBJECTIVES, Task

__all__ = ["OBJECTIVES", "Task"]

import_siblings(__path__, __name__)  # what registers objectives
