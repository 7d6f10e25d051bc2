"""Helpers of the checks of data sets: a source, some of its samples, comparison of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.structures import Sample

from .targets import find

SOME = 30  # samples that are decoded, spread over the data set


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
    return Source(partial(find(target, DATASETS), **(settings or {})))
