"""`interactions`: synthetic data whose best accuracy is known."""

from __future__ import annotations

import numpy as np
import torch

from fusionzoo.errors import check_known, check_number

from ..base import DATASETS, from_memory
from ..paired import PairedDataset
from ..tables.provenance import Provenance

SPLIT_CYCLE = ("train", "val", "train", "test", "train")
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
) -> PairedDataset:
    """Draw vectors a, b, ... with known redundant, unique or synergistic information.

    Each modality holds a fair bit, as +1 or -1 along a fixed direction, under normal noise. A bit
    is misread with probability Q(sqrt(width) / noise), 1e-21 by default; while that is small, the
    best possible accuracy is `interactions_bayes_accuracy(task, num_modalities, flip)`. The split
    is 60/20/20.

    Settings:
        task: the class is, in `redundant`, the bit that all share; in `unique`, a's bit; in `xor`,
            the parity of all bits; in `and`, whether all are +1; in `copy`, all bits (2^M classes)
        num_modalities: number M of modalities, at least 2
        samples: number of samples
        width: dimensions of a vector
        noise: root-mean-square length of a vector's noise; its signal has length 1
        flip: share of classes replaced by random ones, 0 to 1
        seed: of all random draws
    """
    generator = np.random.default_rng(seed)
    bits, target = _draw_bits(task, num_modalities, samples, flip, generator)
    vectors = _draw_vectors(bits, width, noise, generator)
    return from_memory(
        vectors,
        dict.fromkeys(vectors, "vector"),
        ids=[str(row) for row in range(samples)],
        splits=[SPLIT_CYCLE[row % 5] for row in range(samples)],
        target=[str(label) for label in target],
        source=f"interactions ({task})",
        encoders={name: {"name": "vector/mlp", "dim": 32, "hidden": 32} for name in vectors},
        provenance=Provenance(split_rule="fixed"),
    )


def _draw_bits(
    task: str, num_modalities: int, samples: int, flip: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the modalities' bits, (N, M) in 0 and 1, and the classes, (N,)."""
    check_known(task, TASKS, f"unknown task {task!r}")
    check_number("num_modalities", num_modalities, 2)
    bits = generator.integers(0, 2, (samples, num_modalities))
    if task == "redundant":
        bits[:] = bits[:, :1]
    target = _answer(task, bits)
    classes = 2**num_modalities if task == "copy" else 2
    flipped = generator.random(samples) < flip
    return bits, np.where(flipped, generator.integers(0, classes, samples), target)


def _draw_vectors(
    bits: np.ndarray, width: int, noise: float, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Return each modality's vectors, float32 (N, width): its bit along a direction, and noise."""
    samples, num_modalities = bits.shape
    vectors = {}
    for column in range(num_modalities):
        direction = generator.standard_normal(width)
        direction /= np.linalg.norm(direction)
        signal = (2 * bits[:, column : column + 1] - 1) * direction
        values = signal + noise * generator.standard_normal((samples, width)) / width**0.5
        vectors[chr(ord("a") + column)] = torch.from_numpy(values.astype(np.float32))
    return vectors


def interactions_bayes_accuracy(
    task: str, num_modalities: int, flip: float = 0.0, known: int | None = None
) -> float:
    """Return the best possible accuracy from the first `known` modalities, ignoring noise.

    By default all modalities are known.

    >>> [interactions_bayes_accuracy(task, 2, known=1) for task in TASKS]
    [1.0, 1.0, 0.5, 0.75, 0.5]
    """
    known = num_modalities if known is None else known
    classes = 2**num_modalities if task == "copy" else 2
    if known == num_modalities or (task in ("redundant", "unique") and known):
        clean = 1.0
    elif task == "and":
        # If all known bits are +1, the rest decide; otherwise the answer is certainly "no".
        all_unknown = 0.5 ** (num_modalities - known)  # probability that they are +1
        clean = 1 - 0.5**known * min(all_unknown, 1 - all_unknown)
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
