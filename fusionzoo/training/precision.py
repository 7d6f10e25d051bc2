"""Mixed precision by the names of `--train.amp`."""

from __future__ import annotations

import torch

from fusionzoo.config import TrainConfig

AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(cfg: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the autocast context of a run; disabled in full precision."""
    dtype = AMP_DTYPES[cfg.amp]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
