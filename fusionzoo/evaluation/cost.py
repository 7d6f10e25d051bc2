"""What a fusion costs: parameters and multiply-accumulates of one sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..fusion import Fusion, create_fusion
from ..structures import Features

# The standard case: tokens and width of each modality; a ResNet's map, MiniLM, a second of speech.
STANDARD = {"image": (49, 512), "text": (32, 384), "audio": (50, 256)}
STANDARD_DIM, STANDARD_OUTPUTS = 256, 16


class Cost(NamedTuple):
    """Of one fusion, without the encoders."""

    parameters: int
    macs: int  # of one complete sample


def cost(fusion: Fusion, sizes: Mapping[str, tuple[int, int]]) -> Cost:
    """Count parameters and the multiply-accumulates of matrix products, convolutions, attention."""
    training = fusion.training
    given = random_features(sizes, rows=1)
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={on_cpu: _attention_flops}) as counter:
        fusion.eval()(given)
    fusion.train(training)
    parameters = sum(p.numel() for p in fusion.parameters())
    return Cost(parameters, counter.get_total_flops() // 2)


def standard_fusion(name: str) -> Fusion:
    """Build a fusion for the standard case."""
    dims = {modality: width for modality, (_, width) in STANDARD.items()}
    return create_fusion(name, dims, STANDARD_DIM, STANDARD_OUTPUTS)


def random_features(
    sizes: Mapping[str, tuple[int, int]], rows: int, tokens_times: int = 1
) -> dict[str, Features]:
    """Make complete features of `rows` samples: {modality: (tokens, width)}."""
    made = {}
    for name, (count, width) in sizes.items():
        tokens: Tensor = torch.randn(rows, count * tokens_times, width)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
        made[name] = Features(tokens, mask, tokens.mean(1))
    return made


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    """Count what torch's own table leaves out on the CPU; called with the tensors' shapes."""
    return sdpa_flop_count(query, key, value)
