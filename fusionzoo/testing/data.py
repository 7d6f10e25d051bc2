"""The contract of data sets: ids, splits, targets, and samples decoded alike everywhere."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.datasets import DATASETS, Collate, DatasetEntry, PairedDataset
from fusionzoo.encoders import ENCODERS, create_encoder
from fusionzoo.structures import Sample

from .checks import Checks, find

SOME = 30  # samples that are decoded, spread over the data set
CHECKS: Checks[Source] = Checks()
SPLITS = ("train", "val", "test")
DIMENSIONS = {"image": 3, "audio": 1, "vector": 1, "sequence": 2}


@dataclass
class Source:
    """A data set that can be opened several times."""

    open: Callable[[], PairedDataset]

    @cached_property
    def data(self) -> PairedDataset:
        """The data set, opened once."""
        return self.open()

    @cached_property
    def some(self) -> list[int]:
        """Positions of samples to decode: all of a small data set."""
        step = max(1, len(self.data) // SOME)
        return list(range(0, len(self.data), step))


def decoded(source: Source) -> Iterator[tuple[int, Sample]]:
    """Yield position and sample of some samples; those that the data set skips are left out."""
    for position in source.some:
        sample = source.data[position]
        if sample is not None:
            yield position, sample


def opened(source: Source) -> PairedDataset:
    """Return the data set, opened once."""
    return source.data


def assert_equal(sample: Sample | None, expected: Sample, why: str) -> None:
    """Require equal samples, values to the bit."""
    assert sample is not None, f"{why}, {expected.id!r} is skipped"
    for field in ("id", "split", "seed"):
        value, wanted = getattr(sample, field), getattr(expected, field)
        assert value == wanted, f"{why}, {field} {wanted!r} is {value!r}"
    target, wanted = (torch.tensor(x.target or 0.0) for x in (sample, expected))
    assert torch.allclose(target, wanted, equal_nan=True), f"{why}, {expected.id!r} has {target}"
    for name, value in expected.values.items():
        same = _comparable(sample.values.get(name)) == _comparable(value)
        assert same, f"{why}, {name} of {expected.id!r} differs"


def _comparable(value: Any) -> Any:
    """Turn a value into something that `==` compares whole."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    return (value.rate, *_comparable(value.samples)) if hasattr(value, "samples") else value


def source(target: str, settings: Mapping[str, Any] | None = None) -> Source:
    """Return the data set of a name, `module:function` or `file.py:function`."""
    entry = DatasetEntry(name=target, cls=find(target, DATASETS), summary="")
    return Source(partial(entry.build, **(settings or {})))


@CHECKS.add
def ids_are_unique(source: Source) -> None:
    """Tried: the ids of all samples; each is a string that stands once."""
    ids = source.data.ids
    assert len(ids) == len(source.data), f"{len(ids)} ids for {len(source.data)} samples"
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    assert not repeated, f"id {repeated[0]!r} stands {ids.count(repeated[0])} times"
    assert all(isinstance(name, str) and name for name in ids), "an id is no string, or empty"


@CHECKS.add
def every_sample_is_in_one_split(source: Source) -> None:
    """Tried: train, val and test: none is empty, they are disjoint, and together all there is."""
    data = source.data
    parts = {name: data.split(name) for name in SPLITS}
    for name, part in parts.items():
        others = {word for word in part.split_names if word != name}
        assert not others, f"split {name!r} holds a sample of {others}"
    counts = Counter([key for part in parts.values() for key in part.ids])
    for key in data.ids:
        assert counts.get(key, 0) == 1, f"sample {key!r} is in {counts.get(key, 0)} splits"


@CHECKS.add
def groups_are_in_one_split(source: Source) -> None:
    """Tried: the splits of all samples of each group."""
    data = source.data
    assert len(data.groups) == len(data), f"{len(data.groups)} groups for {len(data)} samples"
    splits: dict[str, str] = {}
    for group, split in zip(data.groups, data.split_names, strict=True):
        other = splits.setdefault(group, split)
        assert other == split, f"group {group!r} is in the splits {other} and {split}"


@CHECKS.add
def targets_are_in_range(source: Source) -> None:
    """Tried: the targets of all samples, against classes and against decoded samples."""
    data = source.data
    if data.scheme is None and not data.classes:
        return
    targets = data.targets
    assert len(targets) == len(data), f"{len(targets)} targets for {len(data)} samples"
    if data.scheme is None:
        count = len(data.classes)
        assert len(set(data.classes)) == count, "a class stands twice"
        assert targets.dtype == torch.int64, f"the targets are {targets.dtype}, not int64"
        outside = targets[(targets < 0) | (targets >= count)].tolist()
        assert not outside, f"target {outside[0]} is none of {count} classes"
        training = set(data.split("train").targets.tolist())
        absent = [data.classes[k] for k in range(count) if k not in training]
        assert not absent, f"no training sample is of class {absent[0]!r}"
    for position, sample in decoded(source):
        target = torch.tensor(sample.target, dtype=targets.dtype)
        same = torch.allclose(target, targets[position], equal_nan=True)
        assert same, f"{sample.id!r} has target {target.tolist()}, not {targets[position].tolist()}"


@CHECKS.add
def references_and_lengths_are_of_every_sample(source: Source) -> None:
    """Tried: `references` of each modality, None where it is missing, and `lengths`."""
    data = source.data
    for column, name in enumerate(data.modalities):
        references = data.references(name)
        assert len(references) == len(data), f"{len(references)} references of {name}"
        has_value = [reference is not None for reference in references]
        expected = data.present[:, column].tolist()
        assert has_value == expected, f"references of {name} are not `present`"
    lengths = data.lengths()
    assert lengths.shape == (len(data),), f"lengths are {tuple(lengths.shape)}"
    assert lengths.isfinite().all() and (lengths >= 0).all(), "a length is negative or not finite"
    is_order = sorted(data.by_length()) == list(range(len(data)))
    assert is_order, "by_length is no order of all samples"


@CHECKS.add
def subsets_keep_their_rows_in_line(source: Source) -> None:
    """Tried: the last sample and then the first, as a subset of their own."""
    data = source.data
    rows = [len(data) - 1, 0]
    view = data.subset(rows)
    assert len(view) == 2, f"a subset of two has {len(view)} samples"
    assert view.ids == [data.ids[row] for row in rows], "a subset has other ids"
    assert torch.equal(view.present, data.present[rows]), "a subset has other presence"
    for position, row in enumerate(rows):
        expected = data[row]
        assert expected is not None
        assert_equal(view[position], expected, "in a subset")


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
    some, collate = data.subset(source.some), _without_dataset
    loader = DataLoader(some, batch_size=4, num_workers=2, collate_fn=collate)
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
        keys = (encoder, f"{family}-{kind}", family)
        entry = next((ENCODERS[key] for key in keys if key in ENCODERS), None)
        assert entry is not None, f"{name}: there is no encoder {encoder!r}"
        assert entry.family == kind, f"{name}: {encoder} is for {entry.family}, not {kind}"
        downloads = entry.parameters.get("pretrained") and settings.get("pretrained", True)
        if not downloads and "weights" not in settings:
            built = create_encoder(name, encoder, kind=kind, **settings)
            collate = Collate({name: built.processor(False)})
            samples = [x for _, x in decoded(source) if x.values[name] is not None][:4]
            with torch.no_grad():
                pooled = built.eval()(collate(samples).inputs[name]).pooled
            assert pooled.isfinite().all(), f"{name}: {encoder} gives features that are not finite"
