"""`digits`: a digit as image, word and telephone tone, each degraded; no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusionzoo.errors import FusionZooError, check_number
from fusionzoo.structures import Audio

from ..base import DATASETS, from_memory
from ..paired import PairedDataset
from ..tables.provenance import Provenance

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ROWS, COLUMNS = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0)  # Hz, of a telephone's keys
KEYS = {digit: divmod(digit - 1, 3) for digit in range(1, 10)} | {0: (3, 1)}
RATE = 8000  # Hz

# How much each modality is degraded, so that none alone suffices; the README has the accuracies.
NOISE = 0.2  # standard deviation, relative to the range of pixels
COVERED = 0.4  # probability that one half of the image is grey
LETTERS_LOST = 0.55  # probability that a letter is lost
TONES_LOST = 0.45  # probability that one of the two tones is absent
ENCODERS = {
    "image": {
        "name": "timm/resnet10t",
        "pretrained": False,
        "size": 32,
        "channels": [16, 32, 48, 64],
        "stem_width": 16,
        "output_stride": 16,
    },
    "text": {"name": "chars", "dim": 64, "max_length": 16},
    "audio": {
        "name": "mel/resnet10t",
        "pretrained": False,
        "rate": RATE,
        "num_mels": 40,
        "duration": 0.3,
        "channels": [16, 32, 48, 64],
        "stem_width": 16,
    },
}


@DATASETS.register("digits", family="built-in")
def digits(*, seed: int = 0, samples: int = 1797) -> PairedDataset:
    """Load 1,797 handwritten digits with number words and DTMF tones, each degraded.

    Image: scikit-learn's 8 x 8 pixels enlarged to 32 x 32, with noise, and in 40 % of them one half
    covered. Text: the English word, more than half of its letters lost. Audio: the telephone key's
    two tones, 0.15 to 0.3 s at 8 kHz with noise, in 45 % of them only one of the two. No modality
    alone suffices. The split is 60/20/20, stratified by class; nothing is downloaded.

    The damage of a modality is independent of that of the others, for which averaging the answers
    of single modalities is nearly optimal: it reaches an accuracy of 0.980 in
    results/benchmark/digits, the best of 59 fusions 0.981. `interactions` (planted) and `hanzi`
    (real) are data sets where modalities must be combined.

    Settings:
        seed: of the random degradation
        samples: number of samples to keep, the first ones, 50 to 1797
    """
    check_number("samples", samples, 50, 1798)
    images, target = read_digits()
    generator = np.random.default_rng(seed)
    memory: dict[str, Any] = {
        "image": _degrade_images(images, generator),
        "text": [_degraded_word(digit, generator) for digit in target],
        "audio": [_noisy_tone(digit, generator) for digit in target],
    }
    dataset = from_memory(
        memory,
        {name: name for name in memory},
        ids=[f"{row:04d}" for row in range(len(target))],
        splits=_stratified(target),
        target=[str(digit) for digit in target],
        source="digits",
        encoders=ENCODERS,
        provenance=Provenance(split_rule="fixed, stratified by class"),
    )
    return dataset.subset(range(samples))


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read the images (N, 8, 8) in 0..16 and targets (N,) of scikit-learn (slow to import)."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise FusionZooError("digits needs scikit-learn, which contains its images")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)


def _degrade_images(images: np.ndarray, generator: np.random.Generator) -> torch.Tensor:
    """Cover one half of some, add noise, enlarge: (N, 8, 8) in 0..16 -> uint8 (N, 3, 32, 32)."""
    pixels = images / 16
    halves = [np.s_[:4], np.s_[4:], np.s_[:, :4], np.s_[:, 4:]]
    chosen_halves = generator.integers(0, 4, len(pixels))
    is_covered = generator.random(len(pixels)) < COVERED
    for image, half, covered in zip(pixels, chosen_halves, is_covered, strict=True):
        if covered:
            image[halves[half]] = 0.5
    pixels = (pixels + NOISE * generator.standard_normal(pixels.shape)).clip(0, 1)
    grey = torch.from_numpy((255 * pixels).astype(np.uint8))
    large = grey.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return large[:, None].expand(-1, 3, -1, -1).contiguous()


def _degraded_word(digit: int, generator: np.random.Generator) -> str:
    """Replace letters by dots; several words may match the result."""
    is_lost = generator.random(len(WORDS[digit])) < LETTERS_LOST
    letters = ["." if lost else letter for letter, lost in zip(WORDS[digit], is_lost, strict=True)]
    # Runs of dots are merged, as the word's length would give too much away.
    return "".join(x for i, x in enumerate(letters) if x != "." or i == 0 or letters[i - 1] != ".")


def _noisy_tone(digit: int, generator: np.random.Generator) -> Audio:
    row, column = KEYS[digit]
    tones = [ROWS[row], COLUMNS[column]]
    if generator.random() < TONES_LOST:
        tones.pop(int(generator.integers(2)))
    time = np.arange(int(RATE * generator.uniform(0.15, 0.3))) / RATE
    wave = sum(np.sin(2 * np.pi * (f * time + generator.random())) for f in tones) * 0.2
    wave = wave + 0.2 * generator.standard_normal(len(time))
    return Audio(torch.from_numpy(wave.clip(-1, 1).astype(np.float32)), RATE)


def _stratified(target: np.ndarray) -> list[str]:
    """Assign the samples of each class in turn: three to train, one to val, one to test."""
    order = ("train", "val", "train", "test", "train")
    counts = [0] * 10
    splits = []
    for digit in target:
        splits.append(order[counts[digit] % 5])
        counts[digit] += 1
    return splits
