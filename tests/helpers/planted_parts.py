"""Samples in which one word, region, second or column tells the class, and models of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fusionzoo.encoders import wrap_encoder
from fusionzoo.model import FusionModel, create_model
from fusionzoo.structures import Clip

CLASSES = ("no", "yes")
FILLERS = [
    "the",
    "old",
    "house",
    "by",
    "a",
    "river",
    "was",
    "sold",
    "to",
    "some",
    "people",
    "from",
    "town",
    "last",
    "week",
]
PLANTED = ("pepper", "salt")  # words of the classes
RATE, SECONDS, TONES = 4000, 6, (500.0, 1200.0)  # Hz, s, Hz of the classes
SIDE, PATCH = 32, 5  # pixels
COLUMNS = ("age", "height", "dose", "weight", "score")
CAUSE = "dose"


class PlantedSample(NamedTuple):
    """A row of raw values, its class, and where the class is told."""

    row: dict[str, Any]
    label: int
    word: str
    patch: tuple[int, int]  # top, left
    second: int


def planted_sample(seed: int) -> PlantedSample:
    """Make a sample of every modality, each of which tells the class in one place."""
    rng = np.random.default_rng(seed)
    label = seed % 2
    image = rng.integers(90, 160, (SIDE, SIDE, 3), dtype=np.uint8)
    top, left = rng.integers(0, SIDE - PATCH, 2).tolist()
    image[top : top + PATCH, left : left + PATCH] = (40, 230, 40) if label else (230, 40, 40)
    words = list(rng.choice(FILLERS, 14))
    words.insert(int(rng.integers(15)), PLANTED[label])
    sound = 0.05 * rng.standard_normal(RATE * SECONDS)
    second = int(rng.integers(SECONDS))
    time = np.arange(RATE) / RATE
    sound[second * RATE : (second + 1) * RATE] += 0.5 * np.sin(2 * np.pi * TONES[label] * time)
    cells: dict[str, Any] = {name: float(rng.standard_normal()) for name in COLUMNS}
    cells[CAUSE] = (1.0 if label else -1.0) + 0.1 * cells[CAUSE]
    row = {
        "id": f"s{seed}",
        "image": image,
        "text": " ".join(words),
        "audio": (sound.astype(np.float32), RATE),
        **cells,
    }
    return PlantedSample(row, label, PLANTED[label], (top, left), second)


def colour_shares(image: Tensor) -> Tensor:
    """Return how red and how green a picture is: (2,)."""
    red, green, _ = image.float() / 255
    return 40 * torch.stack([(red - green - 0.3).relu().mean(), (green - red - 0.3).relu().mean()])


def word_counts(text: str) -> Tensor:
    """Return how often each planted word occurs: (2,)."""
    return torch.tensor([float(text.split().count(word)) for word in PLANTED])


def tone_powers(clip: Clip) -> Tensor:
    """Return the power at each planted frequency: (2,)."""
    time = torch.arange(clip.frames) / clip.rate
    waves = [torch.exp(2j * math.pi * tone * time) for tone in TONES]
    return torch.stack([50 * (clip.samples * wave).mean().abs() for wave in waves])


def planted_model(
    modalities: Sequence[str] = ("image", "text", "audio", "tabular"),
    fusion: str = "concat",
    steps: int = 60,
    **settings: Any,
) -> FusionModel:
    """Train a fusion, and a perceptron for columns, on planted samples in a second or two."""
    torch.manual_seed(0)
    prepare = {"image": colour_shares, "text": word_counts, "audio": tone_powers}
    blanks: dict[str, Any] = {"image": torch.zeros(3, 2, 2, dtype=torch.uint8), "text": ""}
    encoders: dict[str, Any] = {
        name: wrap_encoder(nn.Identity(), dim=2, processor=prepare[name], kind=name, **blank)
        for name in modalities
        if name != "tabular"
        for blank in [{"blank": blanks[name]} if name in blanks else {}]
    }
    if "tabular" in modalities:
        columns = [{"name": name, "mean": 0.0, "std": 1.0} for name in COLUMNS]
        encoders["tabular"] = {"name": "tabular/mlp", "columns": columns, "dim": 8}
    settings = {"classes": CLASSES, **settings}
    model = create_model({"name": fusion, "dim": 16}, encoders, **settings)
    if steps:
        train(model, modalities, steps)
    return model.eval()


def train(model: FusionModel, modalities: Sequence[str], steps: int) -> None:
    """Train a model on planted samples; each step hides one modality, so that it reads them all."""
    samples = [planted_sample(seed) for seed in range(1000, 1256)]
    batch = model.batch([raw_values(sample, modalities) for sample in samples])
    target = torch.tensor([sample.label for sample in samples])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(steps):
        present = batch.present.clone()
        if len(modalities) > 1:
            present[:, step % len(modalities)] = False
        loss = nn.functional.cross_entropy(model(batch._replace(present=present)).logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def raw_values(sample: PlantedSample, modalities: Sequence[str]) -> dict[str, Any]:
    """Return a sample as `model.predict` takes it."""
    values = {**sample.row, "tabular": {name: sample.row[name] for name in COLUMNS}}
    return {name: values[name] for name in modalities}


def planted_data(count: int, modalities: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Return data for `fz.explain`, and the samples in it."""
    samples = [planted_sample(seed) for seed in range(count)]
    rows = [
        {
            name: value
            for name, value in sample.row.items()
            if name == "id" or name in modalities or ("tabular" in modalities and name in COLUMNS)
        }
        for sample in samples
    ]
    columns = {"columns": {"tabular": ",".join(COLUMNS)}} if "tabular" in modalities else {}
    return {"name": "manifest", "root": rows, **columns}, samples
