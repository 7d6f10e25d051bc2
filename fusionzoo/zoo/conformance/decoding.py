"""The samples of a data set: decoded alike in every process, and what their kind promises."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.datasets import Collate
from fusionzoo.encoders import ENCODERS, create_encoder
from fusionzoo.structures import Sample

from .checks import Checks
from .samples import Source, assert_equal, decoded

CHECKS: Checks[Source] = Checks()
DIMENSIONS = {"image": 3, "audio": 1, "vector": 1, "sequence": 2}


@CHECKS.add
def presence_is_what_decoding_gives(source: Source) -> None:
    """Tried: `present` against the values of decoded samples."""
    data = source.data
    names = list(data.modalities)
    assert data.present.shape == (len(data), len(names)), f"present is {tuple(data.present.shape)}"
    for position, sample in decoded(source):
        assert list(sample.values) == names, f"{sample.id!r} has values {list(sample.values)}"
        values = [sample.values[name] is not None for name in names]
        present = data.present[position].tolist()
        assert present == values, f"{sample.id!r}: present is {present}, decoding gives {values}"
        assert any(values), f"{sample.id!r} has no modality at all"


@CHECKS.add
def values_are_of_their_kind(source: Source) -> None:
    """Tried: decoded samples; types and shapes by kind, vectors of one width, numbers finite."""
    widths: dict[str, int] = {}
    for _, sample in decoded(source):
        for name, value in sample.values.items():
            if value is None:
                continue
            kind = source.data.modalities[name]
            problem = _problem(kind, value)
            assert not problem, f"{name} of {sample.id!r} {problem}"
            if kind in ("vector", "sequence"):
                width = widths.setdefault(name, value.shape[-1])
                assert value.shape[-1] == width, f"{name} of {sample.id!r} is not {width} wide"


def _problem(kind: str, value: Any) -> str:
    """Say why a value is not what `Sample` promises of its kind."""
    if kind == "text":
        return "" if isinstance(value, str) else f"is a {type(value).__name__}"
    if kind == "audio":
        wave, value = value, value.samples
        if wave.rate < 1 or wave.frames != len(value) or value.ndim != 1:
            return f"is {tuple(value.shape)} at {wave.rate} Hz, with {wave.frames} frames"
    if kind == "tabular":
        cells = value.values() if isinstance(value, dict) else [value]
        wrong = [cell for cell in cells if not (cell is None or isinstance(cell, float | str))]
        return f"holds {wrong[0]!r}" if wrong else ""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}"
    dtype = torch.uint8 if kind == "image" else torch.float32
    colours = kind != "image" or value.shape[0] == 3
    if value.dtype != dtype or value.ndim != DIMENSIONS[kind] or not colours or not value.numel():
        return f"is {value.dtype} of shape {tuple(value.shape)}"
    return "" if value.isfinite().all() else "is not finite"


@CHECKS.add
def two_workers_decode_what_one_process_does(source: Source) -> None:
    """Tried: a loader of two workers against this process; equal to the bit."""
    data = source.data
    loader = DataLoader(
        data.subset(source.some),
        batch_size=4,
        num_workers=2,
        collate_fn=_without_dataset,
    )
    samples = [sample for batch in loader for sample in batch]
    for (_, expected), sample in zip(decoded(source), samples, strict=True):
        assert_equal(sample, expected, "decoded by a worker")


def _without_dataset(samples: Sequence[Sample | None]) -> list[Sample | None]:
    """Drop the samples' link to the data set, which would be sent with each of them."""
    return [sample and sample._replace(goes_on=None) for sample in samples]


@CHECKS.add
def opening_it_again_gives_the_same(source: Source) -> None:
    """Tried: opening it twice with the same settings, whatever the global generators say."""
    data = source.data
    torch.rand(1), random.random(), np.random.rand()
    reopened = source.open()
    assert reopened.ids == data.ids, "opened again, its ids differ"
    assert reopened.split_names == data.split_names, "opened again, its splits differ"
    for position, expected in decoded(source):
        assert_equal(reopened[position], expected, "opened again")


@CHECKS.add
def a_sample_depends_on_its_place_and_seed_alone(source: Source) -> None:
    """Tried: reading each sample twice; the global generators are as they were."""
    data = source.data
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = pickle.dumps(np.random.get_state())
    for position, expected in decoded(source):
        assert_equal(data[position], expected, "read again")
        seed = 7 + position
        sample = data[position, seed]
        assert sample is not None and sample.seed == seed, f"{expected.id!r} ignores its seed"
        assert_equal(sample._replace(seed=expected.seed), expected, f"with seed {seed}")
    assert torch.equal(torch_state, torch.get_rng_state()), "it draws from torch's generator"
    assert python_state == random.getstate(), "it draws from Python's generator"
    drawn = numpy_state != pickle.dumps(np.random.get_state())
    assert not drawn, "it draws from NumPy's generator"


@CHECKS.add
def it_pickles(source: Source) -> None:
    """Tried: pickling it, as workers of a spawned loader need; equal samples to the bit."""
    unpickled = pickle.loads(pickle.dumps(source.data))
    for position, expected in decoded(source):
        assert_equal(unpickled[position], expected, "after unpickling")


@CHECKS.add
def default_encoders_fit_its_modalities(source: Source) -> None:
    """Tried: names and settings of `default_encoders`; those that need no download read samples."""
    data = source.data
    for name, chosen in data.default_encoders.items():
        settings = dict(chosen)
        encoder, kind = settings.pop("name"), data.modalities[name]
        family = encoder.partition("/")[0]
        entry = next(
            (ENCODERS[key] for key in (encoder, f"{family}-{kind}", family) if key in ENCODERS),
            None,
        )
        assert entry is not None, f"{name}: there is no encoder {encoder!r}"
        assert entry.family == kind, f"{name}: {encoder} is for {entry.family}, not {kind}"
        parameters = entry.parameters
        downloads = parameters.get("pretrained") and settings.get("pretrained", True)
        if not downloads and "weights" not in settings:
            built = create_encoder(name, encoder, kind=kind, **settings)
            collate = Collate({name: built.processor(False)})
            samples = [x for _, x in decoded(source) if x.values[name] is not None][:4]
            with torch.no_grad():
                pooled = built.eval()(collate(samples).inputs[name]).pooled
            assert pooled.isfinite().all(), f"{name}: {encoder} gives features that are not finite"
