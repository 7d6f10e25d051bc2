"""Prefixes of vectors: their loss in training, and the record in the model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from strategies import close, make_batch, make_objective, mean, only, see

import fusionzoo as fz
from fusionzoo.config import RunConfig, from_settings
from fusionzoo.structures import FIRST_STEP
from fusionzoo.training.balance._prefixes import prefix_sizes, with_matryoshka
from fusionzoo.training.balance.matryoshka import halves
