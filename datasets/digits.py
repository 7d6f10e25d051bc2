"""`digits`: one digit as a picture, a word and a telephone tone, each damaged; no download."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Audio

from .base import DATASETS, in_memory, tidy
from .failures import MAX_ERRORS, OnError
from .paired import PairedDataset
from .provenance import Provenance

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ROWS, COLUMNS = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0)  # Hz, of a telephone's keys
KEYS = {digit: divmod(digit - 1, 3) for digit in range(1, 10)} | {0: (3, 1)}
RATE = 8000  # Hz

# What each modality loses, so that none suffices: see the figures in docs and in the README.
NOISE = 0.2  # standard deviation, of the picture's range
COVERED = 0.4  # chance that one half of the picture is grey
LETTERS_LOST = 0.55
TONES_LOST = 0.45  # chance that one of the two tones is absent
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
def digits(
    *,
    seed: int = 0,
    samples: int = 1797,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
) -> PairedDataset:
    """1,797 handwritten digits of scikit-learn with number words and DTMF tones, all damaged.

    Picture: 8 x 8 pixels enlarged to 32 x 32, under noise, in four of ten one half covered. Text:
    the English word, more than half of its letters lost. Audio: the telephone key's two tones, 0.15
    to 0.3 s at 8 kHz in noise, often only one of the two. The damage is the same for one `seed`;
    60/20/20 % are train/val/test, stratified. `samples` keeps the first so many, for a quick try.
    """
    if not 50 <= samples <= 1797:
        raise FusionZooError(f"samples={samples}; it is 50 to 1797")
    images, target = read_digits()
    draw = np.random.default_rng(seed)
    memory: dict[str, Any] = {
        "image": _pictures(images, draw),
        "text": [_word(digit, draw) for digit in target],
        "audio": [_tone(digit, draw) for digit in target],
    }
    dataset = in_memory(
        memory,
        {name: name for name in memory},
        ids=[f"{row:04d}" for row in range(len(target))],
        splits=_stratified(target),
        target=[str(digit) for digit in target],
        source="digits",
        on_error=on_error,
        max_errors=max_errors,
        encoders=ENCODERS,
        provenance=Provenance(split_rule="fixed, stratified by class"),
    )
    return tidy(dataset.subset(range(samples)), modalities, missing)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's table of digits: pictures (N, 8, 8) in 0..16 and targets (N,).

    What `sklearn.datasets.load_digits` returns, without the second or two that importing it takes.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise FusionZooError("digits needs scikit-learn, which holds its pictures")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)


def _pictures(images: np.ndarray, draw: np.random.Generator) -> torch.Tensor:
    """Cover one half, add noise, enlarge: (N, 8, 8) in 0..16 -> uint8 (N, 3, 32, 32)."""
    pixels = images / 16
    halves = [np.s_[:4], np.s_[4:], np.s_[:, :4], np.s_[:, 4:]]
    for picture, half, covered in zip(
        pixels, draw.integers(0, 4, len(pixels)), draw.random(len(pixels)) < COVERED, strict=True
    ):
        if covered:
            picture[halves[half]] = 0.5
    pixels = (pixels + NOISE * draw.standard_normal(pixels.shape)).clip(0, 1)
    grey = torch.from_numpy((255 * pixels).astype(np.uint8))
    large = grey.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return large[:, None].expand(-1, 3, -1, -1).contiguous()


def _word(digit: int, draw: np.random.Generator) -> str:
    """Replace letters by a dot; what is left may fit several words."""
    lost = draw.random(len(WORDS[digit])) < LETTERS_LOST
    letters = ["." if gone else letter for letter, gone in zip(WORDS[digit], lost, strict=True)]
    # A run of dots counts as one: the length of the word would give too much away.
    return "".join(x for i, x in enumerate(letters) if x != "." or i == 0 or letters[i - 1] != ".")


def _tone(digit: int, draw: np.random.Generator) -> Audio:
    row, column = KEYS[digit]
    tones = [ROWS[row], COLUMNS[column]]
    if draw.random() < TONES_LOST:
        tones.pop(int(draw.integers(2)))
    time = np.arange(int(RATE * draw.uniform(0.15, 0.3))) / RATE
    wave = sum(np.sin(2 * np.pi * (f * time + draw.random())) for f in tones) * 0.2
    wave = wave + 0.2 * draw.standard_normal(len(time))
    return Audio(torch.from_numpy(wave.clip(-1, 1).astype(np.float32)), RATE)


def _stratified(target: np.ndarray) -> list[str]:
    """Deal each class out in turn: three to train, one to val, one to test."""
    order = ("train", "val", "train", "test", "train")
    seen = [0] * 10
    out = []
    for digit in target:
        out.append(order[seen[digit] % 5])
        seen[digit] += 1
    return out
