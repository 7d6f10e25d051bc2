"""Batches of loader workers: what arrives is what was sent, in memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fusionzoo import create_dataset, create_model, worker_memory
from fusionzoo.encoders.base import Processor
from fusionzoo.structures import Batch
from fusionzoo.worker_memory import MOST_BLOCKS, SMALL, ReusedMemory

WIDTH = SMALL // 4  # of a row: a batch of two is more than what is copied
ROWS = 24


class Rows(Dataset[int]):
    """Row n is n."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Plain(Processor):
    """Makes a row of one value; as `sequence`, of another length for each."""

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        row = torch.full((WIDTH,), float(value))
        return {"row": row, "sequence": row[: WIDTH - value], "length": torch.tensor(value)}

    def blank(self) -> dict[str, Tensor]:
        return self(0)


def make_batch(rows: Any) -> Batch:
    """Collate numbers."""
    inputs: Any = {"a": Plain().collate([Plain()(row) for row in rows])}
    present = torch.ones(len(rows), 1, dtype=torch.bool)
    return Batch([str(row) for row in rows], inputs, present, torch.tensor(list(rows)))


def load(workers: int, collate: Any = make_batch, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), 2, collate_fn=collate, num_workers=workers, **options)


def assert_equal(batches: list[Batch]) -> None:
    """Check batches against those made here."""
    expected = [make_batch([n, n + 1]) for n in range(0, ROWS, 2)]
    assert [batch.ids for batch in batches] == [batch.ids for batch in expected]
    for arrived, made in zip(batches, expected, strict=True):
        for a, b in zip(tensors(arrived), tensors(made), strict=True):
            assert a.dtype == b.dtype
            assert a.equal(b)


def tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch in the order of `map`."""
    listed: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        listed.append(x)
        return x

    batch.map(note)
    return listed


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_batch_arrives_as_it_was_made(workers: int) -> None:
    loader = load(workers, ReusedMemory(make_batch), persistent_workers=workers > 0)
    for _ in range(2):
        assert_equal(list(loader))


@pytest.mark.parametrize("keep", ["batch", "view", "array"])
def test_what_is_kept_of_a_batch_is_not_overwritten(keep: str) -> None:
    loader = load(1, ReusedMemory(make_batch), persistent_workers=True)
    kept: list[Any] = []
    for _ in range(2):
        for batch in loader:
            rows = batch.inputs["a"]["row"]
            kept.append({"batch": rows, "view": rows[1], "array": rows.numpy()}[keep])
            del rows
    values = [int(torch.as_tensor(x).flatten()[-1]) for x in kept]
    assert values == [*range(1, ROWS, 2)] * 2


def test_a_worker_writes_into_the_same_few_blocks() -> None:
    memory = ReusedMemory(make_batch)
    loader = load(1, memory, persistent_workers=True)
    addresses = {batch.inputs["a"]["row"].data_ptr() for _ in range(3) for batch in loader}
    assert 1 < len(memory._blocks) <= MOST_BLOCKS
    assert len(addresses) == len(memory._blocks)
    # After a moment in which all blocks were kept, they are used again.
    kept = list(loader)
    assert len(memory._blocks) == MOST_BLOCKS
    del kept
    assert_equal([batch.map(Tensor.clone) for batch in loader])
    again = {batch.inputs["a"]["row"].data_ptr() for _ in range(2) for batch in loader}
    assert len(again) <= MOST_BLOCKS


def test_small_tensors_do_not_keep_a_block() -> None:
    memory = ReusedMemory(make_batch)
    targets = [batch.target for batch in load(1, memory, persistent_workers=True)]
    assert torch.cat(targets).tolist() == [*range(ROWS)]
    memory.release()
    assert not memory._lent


def test_blocks_of_workers_that_ended_are_forgotten() -> None:
    memory = ReusedMemory(make_batch)
    loader = load(2, memory)  # new workers for each epoch
    for _ in range(3):
        for batch in loader:
            last = batch
        assert len(memory._blocks) <= 2 * 2 * MOST_BLOCKS  # of this epoch's and the last one's
    assert int(last.inputs["a"]["row"][0, 0]) == ROWS - 2


@pytest.mark.parametrize("reason", ["no memory", "another PyTorch"])
def test_without_memory_to_use_again_batches_arrive_as_pytorch_sends_them(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "no memory":
        monkeypatch.setattr(worker_memory, "_has_shared_memory", lambda size: False)
    else:
        monkeypatch.setattr(worker_memory, "_use_count", None)
    memory = ReusedMemory(make_batch)
    assert_equal(list(load(1, memory)))
    assert not memory._blocks


def test_a_larger_batch_gets_a_larger_block() -> None:
    memory = ReusedMemory(make_batch)
    sizes = [1, 1, 1, 1, 6, 6, 2, 6]
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = [list(range(start, start + size)) for start, size in zip(first, sizes, strict=True)]
    loader = DataLoader(Rows(), batch_sampler=rows, collate_fn=memory, num_workers=1)
    batches = [batch.map(Tensor.clone) for batch in loader]
    assert [batch.target.tolist() for batch in batches] == rows
    assert [batch.inputs["a"]["row"][:, -1].tolist() for batch in batches] == rows
    assert max(block.nbytes() for block in memory._blocks.values()) > 6 * 2 * 4 * WIDTH


def test_an_error_in_a_worker_leaves_its_block_free() -> None:
    def fails_once(rows: Any) -> Batch:
        if rows[0] == 6:
            raise ValueError("row 6")
        return make_batch(rows)

    loader = load(1, ReusedMemory(fails_once), persistent_workers=True)
    with pytest.raises(ValueError, match="row 6"):
        list(loader)


@pytest.mark.slow
def test_workers_that_are_not_forked_send_to_the_same_place() -> None:
    data: Any = create_dataset("digits", samples=100)
    memory = ReusedMemory(create_model("concat", data.default_encoders, 10).collate())
    options: dict[str, Any] = {"batch_size": 32, "collate_fn": memory}
    loader = DataLoader(data, num_workers=1, multiprocessing_context="spawn", **options)
    for arrived, made in zip(loader, DataLoader(data, **options), strict=True):
        assert arrived.ids == made.ids
        for a, b in zip(tensors(arrived), tensors(made), strict=True):
            assert a.equal(b)
    assert memory._blocks
