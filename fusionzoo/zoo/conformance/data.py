"""The contract of data sets: ids, splits, targets and references of all samples."""

from __future__ import annotations

from collections import Counter

import torch

from .checks import Checks
from .samples import Source, assert_equal, decoded

CHECKS: Checks[Source] = Checks()
SPLITS = ("train", "val", "test")


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
        own = torch.tensor(sample.target, dtype=targets.dtype)
        same = torch.allclose(own, targets[position], equal_nan=True)
        assert same, f"{sample.id!r} has target {own.tolist()}, not {targets[position].tolist()}"


@CHECKS.add
def references_and_lengths_are_of_every_sample(source: Source) -> None:
    """Tried: `references` of each modality, None where it is missing, and `lengths`."""
    data = source.data
    for column, name in enumerate(data.modalities):
        references = data.references(name)
        assert len(references) == len(data), f"{len(references)} references of {name}"
        there = [reference is not None for reference in references]
        assert there == data.present[:, column].tolist(), f"references of {name} are not `present`"
    lengths = data.lengths()
    assert lengths.shape == (len(data),), f"lengths are {tuple(lengths.shape)}"
    assert lengths.isfinite().all() and (lengths >= 0).all(), "a length is negative or not finite"
    assert sorted(data.by_length()) == list(range(len(data))), (
        "by_length is no order of all samples"
    )


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
