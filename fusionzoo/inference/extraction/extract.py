"""Compute parts: decode in workers, encode and fuse here, write in a thread.

Shapes: `B` batch, `M` modalities, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.config import EmbedConfig, TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.eval_mode import quiet
from fusionzoo.features.identity import data_identity
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch
from fusionzoo.training.optim.memory_and_compile import save_memory_and_compile
from fusionzoo.worker_memory import ReusedMemory

from .identity import describe, parts_key
from .parts import Parts, WritingThread
from .plan import Plan, PlannedBatch
from .tables import schema_of, table_of
from .vectors import InPieces, Wanted, widths


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """An extraction with its settings resolved: what to compute of which rows."""

    model: FusionModel
    dataset: PairedDataset
    plan: Plan
    wanted: Wanted
    schema: pa.Schema
    key: dict[str, str]  # what parts on disk must share
    num_workers: int

    @classmethod
    def of(
        cls,
        cfg: EmbedConfig,
        settings: dict[str, Any],
        model: FusionModel,
        dataset: PairedDataset,
        num_workers: int,
    ) -> Extraction:
        """Resolve the settings of a model on its device and an open data set."""
        wanted = Wanted.of(cfg, model)
        columns = widths(model, wanted)
        data = data_identity(dataset)
        about = describe(cfg, settings, model, dataset, data, columns)
        schema = schema_of(columns, list(model.modalities), cfg.dtype, about)
        key = parts_key(about, data, cfg, model.device)
        return cls.resolved(cfg, model, dataset, num_workers, schema, key)

    @classmethod
    def resolved(
        cls,
        cfg: EmbedConfig,
        model: FusionModel,
        dataset: PairedDataset,
        num_workers: int,
        schema: pa.Schema,
        key: dict[str, str],
    ) -> Extraction:
        """Return an extraction whose columns and digests another process computed."""
        if cfg.compile:
            save_memory_and_compile(model, TrainConfig(compile=True))
        return cls(
            model=model,
            dataset=dataset,
            plan=Plan(dataset.lengths(), cfg.row_group, cfg.batch_size),
            wanted=Wanted.of(cfg, model),
            schema=schema,
            key=key,
            num_workers=num_workers,
        )

    def unbucketed(self) -> Extraction:
        """Return the same with batches in the table's order, to measure what sorting saves."""
        lengths = torch.zeros_like(self.plan.lengths)
        return replace(self, plan=Plan(lengths, self.plan.rows_per_part, self.plan.batch_size))


def extract(
    job: Extraction,
    parts: Parts,
    numbers: Sequence[int],
    *,
    advance: Callable[[int], Any] = lambda rows: None,
    say: Callable[[str], None] = print,
) -> None:
    """Compute some parts and write each as soon as it is complete.

    `advance` is told the rows of each batch.
    """
    numbers = job.plan.longest_first(numbers)
    in_pieces = InPieces(
        job.model, job.wanted, parts.most_rows, say=say, changed=parts.note_most_rows
    )
    with quiet(job.model), WritingThread(parts) as writing:
        collected = _Collected()
        for planned, batch in _batches(job, numbers):
            if batch.ids:  # none where the data set skips all of them
                columns = in_pieces(batch.to(job.model.device))
                collected.add(_positions(job.dataset, planned.rows, batch), batch.present, columns)
            advance(len(planned.rows))
            if planned.is_last:
                rows = job.plan.rows(planned.part)
                writing.add(planned.part, partial(_table, job, rows, *collected.take()))
                collected = _Collected()


def _batches(job: Extraction, numbers: Sequence[int]) -> Iterator[tuple[PlannedBatch, Batch]]:
    """Yield each planned batch with what was loaded for it."""
    keys = ([(row, 0) for row in planned.rows.tolist()] for planned in job.plan.batches(numbers))
    loader: Any = DataLoader(
        job.dataset,
        batch_sampler=keys,
        collate_fn=ReusedMemory(job.model.collate()),
        num_workers=job.num_workers,
        pin_memory=job.model.device.type == "cuda",
        generator=torch.Generator(),  # so that creating an iterator leaves the global one alone
    )
    yield from zip(job.plan.batches(numbers), loader, strict=True)


def _positions(dataset: PairedDataset, rows: Tensor, batch: Batch) -> Tensor:
    """Return the positions in the data set of a batch's rows; a skipped one is not among them."""
    if len(batch.ids) == len(rows):
        return rows
    ids = dataset.subset(rows).ids
    position = dict(zip(ids, rows.tolist(), strict=True))
    return torch.tensor([position[sample_id] for sample_id in batch.ids])


class _Collected:
    """The batches of a part, on the device until it is complete: copying would wait for it."""

    def __init__(self) -> None:
        self.positions: list[Tensor] = []
        self.present: list[Tensor] = []
        self.columns: dict[str, list[Tensor]] = {}

    def add(self, positions: Tensor, present: Tensor, columns: dict[str, Tensor]) -> None:
        self.positions.append(positions)
        self.present.append(present.cpu())
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)

    def take(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return positions (B,), presence (B, M) and columns (B, D) on the CPU."""
        if not self.positions:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.bool), {}
        columns = {name: torch.cat(values).cpu() for name, values in self.columns.items()}
        return torch.cat(self.positions), torch.cat(self.present), columns


def _table(
    job: Extraction, rows: range, positions: Tensor, present: Tensor, columns: dict[str, Tensor]
) -> pa.Table:
    """Put a part's rows in the table's order; those that were not computed are all zero."""
    index = (positions - rows.start).numpy()

    def place(values: Tensor | None, width: int, dtype: Any) -> np.ndarray[Any, Any]:
        ordered = np.zeros((len(rows), width), dtype)
        if values is not None and len(index):
            ordered[index] = values.numpy()
        return ordered

    vectors = {
        name: place(columns.get(name), job.schema.field(name).type.list_size, np.float32)
        for name in job.schema.names
        if pa.types.is_fixed_size_list(job.schema.field(name).type)
    }
    flags = place(present, len(job.model.modalities), np.bool_)
    return table_of(job.schema, job.dataset.subset(rows), flags, vectors)
