"""The setting `--speed` of training, embedding, evaluation, prediction and benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

HELP = "auto: measure memory format, bf16 and loader processes at start, and take what is faster"


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Whether settings that make work faster are chosen by a short measurement."""

    speed: Literal["off", "auto"] = field(default="off", metadata={"help": HELP})
