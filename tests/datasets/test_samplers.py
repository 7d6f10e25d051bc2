"""The order of samples: a function of seed, epoch and position, shared out without loss."""

from __future__ import annotations

import pytest
import torch

from fusionzoo.datasets import PairedBatchSampler, make_sampler
from fusionzoo.errors import FusionZooError


class Rows:
    """As much of a data set as a sampler needs."""

    def __init__(self, size: int) -> None:
        self.targets = (torch.arange(size) % 10 == 0).long()  # one in ten is of class 1

    def __len__(self) -> int:
        return len(self.targets)


def shards(size: int, world: int, **settings: object) -> list[list[int]]:
    return [
        list(make_sampler(Rows(size), distributed=(rank, world), **settings))  # type: ignore[arg-type]
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_sees_each_sample_once(world: int) -> None:
    parts = shards(20, world, shuffle=False)
    assert sorted(i for part in parts for i in part) == list(range(20))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("tail", [{}, {"pad": True}])
def test_training_gives_each_process_the_same_number(tail: dict[str, bool]) -> None:
    parts = shards(20, 3, shuffle=True, **tail)
    assert [len(part) for part in parts] == [7] * 3
    assert len({i for part in parts for i in part}) == 20


def test_more_processes_than_samples_still_get_one_each() -> None:
    assert [len(part) for part in shards(2, 5, shuffle=True)] == [1] * 5
    assert sum(len(part) for part in shards(2, 5, shuffle=False)) == 2


def test_epochs_differ_and_repeat_exactly() -> None:
    sampler = make_sampler(Rows(50), shuffle=True, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(make_sampler(Rows(50), shuffle=True, seed=4)) != first


@pytest.mark.parametrize("world", [1, 2])
def test_class_weights_show_each_class_as_often(world: int) -> None:
    rows = Rows(2000)
    seen = [i for part in shards(2000, world, shuffle=True, weights="class") for i in part]
    assert len(seen) == 2000
    assert rows.targets[seen].double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_given_weights_leave_out_what_has_none() -> None:
    weights = torch.zeros(30)
    weights[[4, 9]] = torch.tensor([1.0, 3.0])
    seen = [i for part in shards(30, 2, shuffle=True, weights=weights) for i in part]
    assert set(seen) == {4, 9}


@pytest.mark.parametrize("lengths", [None, torch.arange(23).flip(0)])
def test_two_processes_see_the_rows_of_one_with_the_double_batch(
    lengths: torch.Tensor | None,
) -> None:
    whole = PairedBatchSampler(make_sampler(Rows(22), shuffle=True), 8, lengths=lengths)
    parts = [
        PairedBatchSampler(
            make_sampler(Rows(22), shuffle=True, distributed=(rank, 2)), 4, lengths=lengths
        )
        for rank in range(2)
    ]
    for epoch in range(3):
        for one in (whole, *parts):
            one.set_epoch(epoch)
        for batch, *shares in zip(whole, *parts, strict=True):
            assert sorted(batch) == sorted(key for share in shares for key in share)


@pytest.mark.parametrize("lengths", [None, torch.arange(50) % 7])
def test_a_pass_may_begin_in_the_middle(lengths: torch.Tensor | None) -> None:
    sampler = PairedBatchSampler(make_sampler(Rows(50), shuffle=True), 8, lengths=lengths)
    sampler.set_epoch(4)
    everything = list(sampler)
    assert len(everything) == len(sampler) == 7
    sampler.set_epoch(0)
    for start, stop in ((3, 7), (0, 2)):
        sampler.set_part(4, start, stop)
        assert list(sampler) == everything[start:stop]
        assert len(sampler) == stop - start


def test_each_visit_has_a_seed_of_its_own() -> None:
    sampler = PairedBatchSampler(make_sampler(Rows(40), shuffle=True), 8)
    keys = {key for epoch in range(3) for batch in at_epoch(sampler, epoch) for key in batch}
    assert len({seed for _, seed in keys}) == 120
    assert all(seed > 0 for _, seed in keys)


def at_epoch(sampler: PairedBatchSampler, epoch: int) -> list[list[tuple[int, int]]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("shuffle", [True, False])
def test_similar_lengths_meet(shuffle: bool) -> None:
    lengths = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    rows = Rows(400)

    def spread(given: torch.Tensor | None) -> float:
        sampler = PairedBatchSampler(make_sampler(rows, shuffle=shuffle), 16, lengths=given)
        found = [lengths[[i for i, _ in batch]].double() for batch in sampler]
        return sum(float(x.max() - x.min()) for x in found) / len(found)

    assert spread(lengths) < 0.1 * spread(None)
    sampler = PairedBatchSampler(make_sampler(rows, shuffle=shuffle), 16, lengths=lengths)
    assert sorted(i for batch in sampler for i, _ in batch) == list(range(400))


def test_batches_that_would_never_come_are_an_error() -> None:
    with pytest.raises(FusionZooError, match="nothing to sample from: 0 samples"):
        make_sampler(Rows(0), shuffle=True)
    with pytest.raises(FusionZooError, match="batch_size=0"):
        PairedBatchSampler(make_sampler(Rows(4), shuffle=True), 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"distributed": (2, 2)}, "the rank must be below 2"),
        ({"weights": [1.0, 2.0]}, "2 weights for 10 samples"),
        ({"weights": [-1.0] * 10}, "10 weights for"),
        ({"weights": [float("nan")] * 10}, "10 weights for"),
        ({"weights": [0.0] * 10}, "all weights are 0"),
        ({"weights": "clas"}, "only named scheme is 'class'"),
    ],
)
def test_a_wrong_request_is_one_clear_error(settings: dict[str, object], says: str) -> None:
    with pytest.raises(FusionZooError, match=says):
        make_sampler(Rows(10), shuffle=True, **settings)  # type: ignore[arg-type]
