"""The contract's checks catch what commonly goes wrong in a data set."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from fusionzoo.cli import main
from fusionzoo.datasets import PairedDataset
from fusionzoo.structures import Sample
from fusionzoo.testing.checks import Checks
from fusionzoo.testing.data import Source, source
from fusionzoo.testing.runner import SUITES

ROWS = 30
CHECKS = SUITES["data"]().checks


def sound(cls: type[PairedDataset] = PairedDataset, seed: int = 0, **columns: Any) -> PairedDataset:
    """Thirty vectors, some of them with a text, in three splits; mutants change something."""
    draw = np.random.default_rng(seed)
    number = list(range(ROWS))
    table = {
        "id": [f"s{row}" for row in number],
        "split": ["train", "val", "test"] * (ROWS // 3),
        "target": [str(row % 2) for row in number],
        "vector": number,
        "text": [None if row % 4 == 0 else f"text {row}" for row in number],
        **columns,
    }
    vectors = torch.from_numpy(draw.standard_normal((ROWS, 3)).astype(np.float32))
    encoders = {"text": {"name": "chars", "dim": 8, "num_heads": 2, "num_layers": 1}}
    return cls(
        pa.table(table),
        {"vector": "vector", "text": "text"},
        memory={"vector": vectors},
        encoders=encoders,
    )


def repeated_id() -> PairedDataset:
    return sound().subset([*range(ROWS), 0])


def misspelt_split() -> PairedDataset:
    return sound(split=["train", "valid", "test"] * (ROWS // 3))


def overlapping_splits() -> PairedDataset:
    class Overlapping(PairedDataset):
        def split(self, name: str) -> PairedDataset:
            part = super().split(name)
            return part if name == "train" else self.subset([*part.rows.tolist(), 0])

    return sound(Overlapping)


def torn_group() -> PairedDataset:
    return sound(group=[f"g{row // 2}" for row in range(ROWS)])


class Changed(PairedDataset):
    """Changes what is decoded."""

    def change(self, sample: Sample) -> Sample:
        return sample

    def __getitem__(self, key: int | tuple[int, int]) -> Sample | None:
        sample = super().__getitem__(key)
        assert sample is not None
        return self.change(sample)


def changed(change: Callable[[Any, Sample], Any]) -> Callable[[], PairedDataset]:
    """A data set whose vectors are what `change` makes of them."""

    class Mutant(Changed):
        def change(self, sample: Sample) -> Sample:
            vector = change(sample.values["vector"], sample)
            return sample._replace(values={**sample.values, "vector": vector})

    return lambda: sound(Mutant)


class NoSeed(Changed):
    def change(self, sample: Sample) -> Sample:
        return sample._replace(seed=0)


class CountedFromOne(PairedDataset):
    @property
    def targets(self) -> Tensor:
        return super().targets + 1


class ReferencesOfWhatIsThere(PairedDataset):
    def references(self, modality: str) -> list[Any]:
        return [reference for reference in super().references(modality) if reference is not None]


class PresenceOfTheWholeTable(PairedDataset):
    @property
    def present(self) -> Tensor:
        columns = [torch.tensor(self.table[name].is_valid().to_numpy()) for name in self.modalities]
        return torch.stack(columns, dim=1)


class EncoderOfAnotherKind(PairedDataset):
    @property
    def default_encoders(self) -> dict[str, dict[str, Any]]:
        return {**super().default_encoders, "text": {"name": "timm/resnet18"}}


class EncoderOfAnotherWidth(PairedDataset):
    @property
    def default_encoders(self) -> dict[str, dict[str, Any]]:
        return {**super().default_encoders, "vector": {"name": "vector/mlp", "in_dim": 2}}


class HoldsAFunction(PairedDataset):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.transform = lambda value: value


def of_class(cls: type[PairedDataset]) -> Callable[[], PairedDataset]:
    return lambda: sound(cls)


def drawn_at_opening() -> PairedDataset:
    return sound(seed=random.randrange(1000))


CAUGHT_BY: dict[str, tuple[Callable[[], PairedDataset], str]] = {
    "repeated_id": (repeated_id, "ids_are_unique"),
    "misspelt_split": (misspelt_split, "every_sample_is_in_one_split"),
    "overlapping_splits": (overlapping_splits, "every_sample_is_in_one_split"),
    "torn_group": (torn_group, "groups_are_in_one_split"),
    "silently_missing": (
        changed(lambda x, sample: None if sample.id == "s3" else x),
        "presence_is_what_decoding_gives",
    ),
    "double_precision": (changed(lambda x, _: x.double()), "values_are_of_their_kind"),
    "of_its_process": (
        changed(lambda x, _: x + os.getpid()),
        "two_workers_decode_what_one_process_does",
    ),
    "drawn_at_opening": (drawn_at_opening, "opening_it_again_gives_the_same"),
    "noisy_decoding": (
        changed(lambda x, _: x + 0.1 * random.random()),
        "a_sample_depends_on_its_place_and_seed_alone",
    ),
    "no_seed": (of_class(NoSeed), "a_sample_depends_on_its_place_and_seed_alone"),
    "counted_from_one": (of_class(CountedFromOne), "targets_are_in_range"),
    "references": (of_class(ReferencesOfWhatIsThere), "references_and_lengths_are_of_every_sample"),
    "presence": (of_class(PresenceOfTheWholeTable), "subsets_keep_their_rows_in_line"),
    "encoder_of_another_kind": (
        of_class(EncoderOfAnotherKind),
        "default_encoders_fit_its_modalities",
    ),
    "encoder_of_another_width": (
        of_class(EncoderOfAnotherWidth),
        "default_encoders_fit_its_modalities",
    ),
    "holds_a_function": (of_class(HoldsAFunction), "it_pickles"),
}


def test_the_sound_one_passes() -> None:
    assert [x for x in CHECKS.run(source(f"{__file__}:sound")) if x[1]] == []


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_the_broken_one_is_caught(mutant: str) -> None:
    opened, check = CAUGHT_BY[mutant]
    problems = dict(Checks({check: CHECKS[check]}).run(Source(opened)))
    assert problems[check]


def test_every_check_catches_something() -> None:
    assert {check for _, check in CAUGHT_BY.values()} == set(CHECKS)


def test_the_command_line_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "check", "--data", f"{__file__}:torn_group"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  groups are in one split\n" in out
    assert "Found: AssertionError: group 'g0' is in the splits train and val" in out
    assert main(["zoo", "check", "--data", "interactions", "--set", "samples=60"]) == 0
    assert f"interactions: {len(CHECKS)} of {len(CHECKS)} checks" in capsys.readouterr().out
    assert main(["zoo", "check", "--data", "manifest", "--set", "root=nowhere.csv"]) == 2
    assert "no file nowhere.csv" in capsys.readouterr().err
