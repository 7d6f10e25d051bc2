"""`interactions`: vectors that share, own or only together hold the answer, by design."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fusionzoo.errors import FusionZooError, did_you_mean

from .base import DATASETS, in_memory, tidy
from .failures import MAX_ERRORS, OnError
from .paired import PairedDataset
from .provenance import Provenance

TASKS = ("redundant", "unique", "xor", "and", "copy")


@DATASETS.register("interactions", family="built-in")
def interactions(
    *,
    task: str = "xor",
    num_modalities: int = 2,
    samples: int = 2000,
    width: int = 8,
    noise: float = 0.3,
    flip: float = 0.0,
    seed: int = 0,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
) -> PairedDataset:
    """Synthetic vectors a, b, ... with known redundant, unique and synergistic information.

    Each modality holds one fair bit, +1 or -1 along a fixed direction of `width` dimensions, plus
    normal noise. `redundant`: all hold the same bit, the target. `unique`: the target is a's bit.
    `xor`: their product, of which no modality alone says anything. `and`: whether all are +1.
    `copy`: all bits, 2^M classes. A share `flip` of the targets is replaced at random. A bit is
    misread with chance Q(sqrt(width) / noise), by default 1e-21; while that is small, the best
    possible accuracy is `bayes_accuracy(task, num_modalities, flip)`. Split 60/20/20.
    """
    _check_task(task, num_modalities)
    draw = np.random.default_rng(seed)
    bits, target = _draw_bits(task, num_modalities, samples, flip, draw)
    vectors = _draw_vectors(bits, width, noise, draw)
    splits = ("train", "val", "train", "test", "train")
    dataset = in_memory(
        vectors,
        dict.fromkeys(vectors, "vector"),
        ids=[str(row) for row in range(samples)],
        splits=[splits[row % 5] for row in range(samples)],
        target=[str(label) for label in target],
        source=f"interactions ({task})",
        on_error=on_error,
        max_errors=max_errors,
        encoders={name: {"name": "vector/mlp", "dim": 32, "hidden": 32} for name in vectors},
        provenance=Provenance(split_rule="fixed"),
    )
    return tidy(dataset, modalities, missing)


def _check_task(task: str, num_modalities: int) -> None:
    if task not in TASKS:
        raise FusionZooError(
            f"unknown task {task!r}.{did_you_mean(task, TASKS)} {', '.join(TASKS)}"
        )
    if num_modalities < 2:
        raise FusionZooError(f"num_modalities={num_modalities}; an interaction needs at least 2")


def _draw_bits(
    task: str, num_modalities: int, samples: int, flip: float, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the modalities' bits, (N, M) in 0 and 1, and the classes, (N,)."""
    bits = draw.integers(0, 2, (samples, num_modalities))
    if task == "redundant":
        bits[:] = bits[:, :1]
    target = _answer(task, bits)
    classes = 2**num_modalities if task == "copy" else 2
    flipped = draw.random(samples) < flip
    return bits, np.where(flipped, draw.integers(0, classes, samples), target)


def _draw_vectors(
    bits: np.ndarray, width: int, noise: float, draw: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Write each modality's bit into vectors, float32 (N, width), under noise."""
    samples, num_modalities = bits.shape
    vectors = {}
    for column in range(num_modalities):
        direction = draw.standard_normal(width)
        direction /= np.linalg.norm(direction)
        signal = (2 * bits[:, column : column + 1] - 1) * direction
        values = signal + noise * draw.standard_normal((samples, width)) / width**0.5
        vectors[chr(ord("a") + column)] = torch.from_numpy(values.astype(np.float32))
    return vectors


def bayes_accuracy(
    task: str, num_modalities: int, flip: float = 0.0, known: int | None = None
) -> float:
    """Return the best accuracy from the first `known` modalities (default: all), noise aside.

    >>> [bayes_accuracy(task, 2, known=1) for task in TASKS]
    [1.0, 1.0, 0.5, 0.75, 0.5]
    """
    known = num_modalities if known is None else known
    classes = 2**num_modalities if task == "copy" else 2
    if known == num_modalities or (task in ("redundant", "unique") and known):
        clean = 1.0
    elif task == "and":
        # All known bits +1: then the rest decide; otherwise the answer is certainly "no".
        rest = 0.5 ** (num_modalities - known)
        clean = 1 - 0.5**known * min(rest, 1 - rest)
    else:
        clean = 0.5 ** (num_modalities - known) if task == "copy" else 0.5
    return (1 - flip) * clean + flip / classes


def _answer(task: str, bits: np.ndarray) -> np.ndarray:
    if task in ("redundant", "unique"):
        return bits[:, 0]
    if task == "xor":
        return bits.sum(1) % 2
    if task == "and":
        return bits.all(1).astype(int)
    return bits @ (1 << np.arange(bits.shape[1]))
