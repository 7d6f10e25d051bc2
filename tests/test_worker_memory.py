"""Batches of loader workers: what arrives is what was sent, in memory that is used again."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fusionzoo import create_dataset, create_model, worker_memory
from fusionzoo.config import RunConfig, from_args
from fusionzoo.encoders.base import Processor
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Batch
from fusionzoo.worker_memory import BUSY, MOST_BLOCKS, SMALL, ReusedMemory

WIDTH = SMALL // 4  # of a row: a batch of two is more than what is copied
ROWS = 24


class Rows(Dataset[int]):
    """Row n is n."""

    reuse_memory = True

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


def test_a_kept_storage_is_not_overwritten() -> None:
    loader = load(1, ReusedMemory(make_batch), persistent_workers=True)
    kept = [
        (batch.ids, batch.inputs["a"]["row"].untyped_storage())
        for _ in range(2)
        for batch in loader
    ]
    for ids, storage in kept:
        values = torch.empty(0).set_(storage)[-1 - WIDTH :: WIDTH].tolist()
        assert values == [float(x) for x in ids]


def test_a_tensor_put_into_a_queue_is_not_overwritten() -> None:
    context = torch.multiprocessing.get_context("fork")
    queue, answers, seen = context.Queue(), context.Queue(), context.Event()
    reader = context.Process(target=_read_when_told, args=(queue, answers, seen))
    reader.start()
    loader = load(1, ReusedMemory(make_batch), persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            queue.put(batch.inputs["a"]["row"])
            del batch
    queue.put(None)
    seen.set()
    values = answers.get(timeout=60)
    reader.join(60)
    assert values == [*range(1, ROWS, 2)] * 2


def _read_when_told(queue: Any, answers: Any, seen: Any) -> None:
    """Receive tensors until None; once told, answer with the last value of each."""
    tensors = list(iter(queue.get, None))
    seen.wait(60)
    answers.put([int(x[-1, -1]) for x in tensors])


def test_a_forked_process_keeps_the_batches_that_it_inherits() -> None:
    """A loader's workers, say, whose data set refers to a batch; the parent forgets it."""
    loader = load(1, ReusedMemory(make_batch), persistent_workers=True)
    batches = iter(loader)
    row = next(batches).inputs["a"]["row"]
    end, other = os.pipe()
    child = os.fork()
    if not child:
        os.read(end, 1)  # until the parent has received all others
        os._exit(int(row[-1, -1]) != 1)
    del row
    assert len(list(batches)) == ROWS // 2 - 1
    os.write(other, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_that_ends_frees_no_block_of_its_parent() -> None:
    loader = load(1, ReusedMemory(make_batch), persistent_workers=True)
    kept: list[Any] = []
    for batch in loader:
        kept.append(batch)
        child = os.fork()
        if not child:
            kept.clear()
            del batch
            os._exit(0)
        os.waitpid(child, 0)
    assert_equal(kept)


def test_threads_with_one_object_receive_what_was_sent() -> None:
    memory = ReusedMemory(make_batch)
    wrong: list[list[float]] = []

    def read(loader: Any) -> None:
        for _ in range(8):
            for batch in loader:
                values = batch.inputs["a"]["row"][:, -1].tolist()
                if values != [float(x) for x in batch.ids]:
                    wrong.append(values)

    threads = [
        threading.Thread(target=read, args=[load(2, memory, persistent_workers=True)])
        for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_memory_is_in_use_while_a_batch_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that receives a batch at that moment frees nothing of this one."""
    memory = ReusedMemory(make_batch)
    states: list[int] = []
    receive = ReusedMemory.receive

    def receive_slowly(self: Any, *parts: Any) -> Any:
        block = receive(self, *parts)
        if hasattr(self, "release"):  # what another thread would do now
            self.release()
        states.append(int(block[0]))
        return block

    monkeypatch.setattr(ReusedMemory, "receive", receive_slowly)
    for batch in load(1, memory):
        assert batch.inputs["a"]["row"][:, -1].tolist() == [float(x) for x in batch.ids]
    assert states == [BUSY] * (ROWS // 2)


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
    assert not memory._leases


def test_blocks_of_workers_that_ended_are_forgotten() -> None:
    memory = ReusedMemory(make_batch)
    loader = load(2, memory)  # new workers for each epoch
    for _ in range(3):
        for batch in loader:
            last = batch
        assert len(memory._blocks) <= 2 * 2 * MOST_BLOCKS  # of this epoch's and the last one's
    assert int(last.inputs["a"]["row"][0, 0]) == ROWS - 2


@pytest.mark.parametrize("reason", ["no memory", "switched off"])
def test_without_memory_to_use_again_batches_arrive_as_pytorch_sends_them(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "no memory":
        monkeypatch.setattr(worker_memory, "_has_shared_memory", lambda size: False)
    else:
        monkeypatch.setattr(Rows, "reuse_memory", False)
    memory = ReusedMemory(make_batch)
    assert_equal(list(load(1, memory)))
    assert not memory._blocks


def test_the_setting_of_a_data_set_switches_it_off() -> None:
    settings = from_args(RunConfig, ["--data.name", "digits", "--data.reuse_memory", "off"]).data
    memory = ReusedMemory(lambda samples: make_batch(range(len(samples))))
    data: Any = create_dataset(**settings, samples=60).split("train")
    list(DataLoader(data, 8, collate_fn=memory, num_workers=1))
    assert not memory._blocks
    with pytest.raises(FusionZooError, match="reuse_memory='maybe' is neither on nor off"):
        create_dataset("digits", reuse_memory="maybe")


def test_a_larger_batch_gets_a_larger_block() -> None:
    memory = ReusedMemory(make_batch)
    sizes = [1, 1, 1, 1, 6, 6, 2, 6]
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = [list(range(start, start + size)) for start, size in zip(first, sizes, strict=True)]
    loader = DataLoader(Rows(), batch_sampler=rows, collate_fn=memory, num_workers=1)
    batches = [batch.map(Tensor.clone) for batch in loader]
    assert [batch.target.tolist() for batch in batches] == rows
    assert [batch.inputs["a"]["row"][:, -1].tolist() for batch in batches] == rows
    assert max(block.nbytes for block in memory._blocks.values()) > 6 * 2 * 4 * WIDTH


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
