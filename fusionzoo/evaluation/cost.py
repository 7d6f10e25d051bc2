"""Cost of a fusion: parameters, multiply-accumulates, latency, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features, evaluating

# Reference sizes, (tokens, width) by modality: a ResNet feature map, MiniLM, a second of speech.
STANDARD = {"image": (49, 512), "text": (32, 384), "audio": (50, 256)}
STANDARD_DIM, STANDARD_OUTPUTS = 256, 16


class Cost(NamedTuple):
    """Cost of one fusion, without the encoders."""

    parameters: int
    macs: int  # of one sample that has all modalities


def cost(fusion: Fusion, sizes: Mapping[str, tuple[int, int]]) -> Cost:
    """Count parameters and multiply-accumulates; `sizes`: modality -> (tokens, width)."""
    parameters = sum(p.numel() for p in fusion.parameters())
    return Cost(parameters, macs(fusion, random_features(sizes, rows=1)))


def macs(fusion: Fusion, features: Mapping[str, Features]) -> int:
    """Count the multiply-accumulates of matrix products, convolutions and attention."""
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's table lacks it
    lacking = {on_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}
    counter = FlopCounterMode(display=False, custom_mapping=lacking)
    with evaluating(fusion), counter:
        fusion(features)
    return counter.get_total_flops() // 2


def head_cost(fusion: Fusion, features: Mapping[str, Features]) -> dict[str, float]:
    """Measure a fusion on encoded features of real data.

    Returns `parameters`; `macs` of the first sample; median `latency_ms` of one sample and
    `samples_per_second` in batches of 64; `memory_mb` of a training step on 32 samples (weights,
    gradients, Adam's two moments, saved activations).
    """

    def first_rows(count: int) -> dict[str, Features]:
        return {name: Features(*(x[:count] for x in tensors)) for name, tensors in features.items()}

    batch = min(len(next(iter(features.values())).mask), 64)
    parameters = sum(p.numel() for p in fusion.parameters())
    activations = _saved_bytes(fusion, first_rows(32))
    fusion.eval()
    return {
        "parameters": parameters,
        "macs": macs(fusion, first_rows(1)),
        "latency_ms": 1e3 * _median_seconds(fusion, first_rows(1)),
        "samples_per_second": batch / _median_seconds(fusion, first_rows(batch)),
        "memory_mb": (16 * parameters + activations) / 2**20,
    }


def _saved_bytes(fusion: Fusion, features: Mapping[str, Features]) -> int:
    """Return the bytes of activations saved for the backward pass, each storage counted once."""
    bytes_by_storage: dict[int, int] = {}
    weight_storages = {p.untyped_storage().data_ptr() for p in fusion.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    # The output stays alive until the end of the block, so that no address is reused.
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with torch.random.fork_rng(devices=[]), hooks:
        output = fusion.train()(features)
    del output
    return sum(bytes_by_storage.values())


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
    """Build a fusion for features of the reference sizes."""
    dims = {modality: width for modality, (_, width) in STANDARD.items()}
    return create_fusion(name, dims, STANDARD_DIM, STANDARD_OUTPUTS)


def random_features(
    sizes: Mapping[str, tuple[int, int]], rows: int, tokens_times: int = 1
) -> dict[str, Features]:
    """Draw random features of `rows` samples; `sizes`: modality -> (tokens, width)."""
    features = {}
    for name, (count, width) in sizes.items():
        tokens: Tensor = torch.randn(rows, count * tokens_times, width)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
        features[name] = Features(tokens, mask, tokens.mean(1))
    return features
