"""What a fusion costs: parameters and multiply-accumulates of one sample."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fusionzoo.eval_mode import quiet
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features

# The standard case: tokens and width of each modality; a ResNet's map, MiniLM, a second of speech.
STANDARD = {"image": (49, 512), "text": (32, 384), "audio": (50, 256)}
STANDARD_DIM, STANDARD_OUTPUTS = 256, 16


class Cost(NamedTuple):
    """Of one fusion, without the encoders."""

    parameters: int
    macs: int  # of one complete sample


def cost(fusion: Fusion, sizes: Mapping[str, tuple[int, int]]) -> Cost:
    """Count parameters and multiply-accumulates of a fusion for features of given sizes."""
    parameters = sum(p.numel() for p in fusion.parameters())
    return Cost(parameters, macs(fusion, random_features(sizes, rows=1)))


def macs(fusion: Fusion, given: Mapping[str, Features]) -> int:
    """Count the multiply-accumulates of matrix products, convolutions, attention."""
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={on_cpu: _attention_flops})
    with quiet(fusion), counter:
        fusion(given)
    return counter.get_total_flops() // 2


def head_cost(fusion: Fusion, features: Mapping[str, Features]) -> dict[str, float]:
    """Measure a fusion on features that it will meet.

    `parameters`; `macs` of the first sample; `latency_ms` of one sample and `samples_per_second` in
    batches of 64, medians; `memory_mb` of a training step on 32: weights, gradients, Adam's two
    moments and what the backward pass keeps.
    """

    def some(count: int) -> dict[str, Features]:
        return {name: Features(*(x[:count] for x in one)) for name, one in features.items()}

    rows = len(next(iter(features.values())).mask)
    batch = min(rows, 64)
    parameters = sum(p.numel() for p in fusion.parameters())
    kept = _saved_bytes(fusion, some(32))
    fusion.eval()
    return {
        "parameters": parameters,
        "macs": macs(fusion, some(1)),
        "latency_ms": 1e3 * _median_seconds(fusion, some(1)),
        "samples_per_second": batch / _median_seconds(fusion, some(batch)),
        "memory_mb": (16 * parameters + kept) / 2**20,
    }


def _saved_bytes(fusion: Fusion, features: Mapping[str, Features]) -> int:
    """Sum up what the backward pass keeps of one forward pass, each storage once."""
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in fusion.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    # The outputs live until the end, so no address is used twice.
    with (
        torch.random.fork_rng(devices=[]),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        output = fusion.train()(features)
    del output
    return sum(held.values())


@torch.no_grad()
def _median_seconds(fusion: Fusion, features: Mapping[str, Features], rounds: int = 9) -> float:
    fusion(features)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        fusion(features)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


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
