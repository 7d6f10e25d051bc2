"""Paired samples: a table of references, aligned by id and decoded on access."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import Sample

from .amputation import Incomplete
from .arrow import rows_equal_to
from .defaults import fill_encoders
from .display import Displayed
from .exchange import Exchange
from .failures import MAX_ERRORS, Failures, OnError, check_policy
from .lengths import Measured
from .media import decode
from .provenance import Provenance
from .table import presence, word_list


class PairedDataset(Displayed, Exchange, Incomplete, Measured, Dataset[Sample | None]):
    """Samples with an id, a split, a target and, per modality, a value or nothing.

    `table` has text columns `id`, `split`, `target` and a column per modality, which `modalities`
    maps to its kind. A modality's cell is a path, text, a list or a row number into
    `memory[modality]`; null means that the sample lacks it.

    `targets` maps label columns to kinds of `fusionzoo.targets`, `{"age": "regression"}`. None: the
    column `target` has one class per sample; an empty mapping: labels are not read.

    Strings are paths relative to `root` (or to the working directory); those of text are the text
    itself, unless `paths` names the modality. A path may not leave `root`, links resolved, unless
    `allow_outside`.

    `on_error` decides about a value that cannot be decoded, or that an encoder's processor refuses:
    `raise` its error, treat it as `missing`, or `skip` its sample. `failures()` lists these values,
    including those met in workers. If more than a share `max_errors` of a modality's values fail,
    an error ends the run, see `Failures.too_many`.
    """

    reuse_memory = True  # whether batches of loader processes go through `worker_memory`

    def __init__(
        self,
        table: pa.Table,
        modalities: Mapping[str, str],
        *,
        memory: Mapping[str, Sequence[Any] | Tensor] | None = None,
        root: Path | None = None,
        source: str = "the data set",
        on_error: OnError = "raise",
        max_errors: float = MAX_ERRORS,
        encoders: Mapping[str, Mapping[str, Any]] | None = None,
        targets: Mapping[str, str] | None = None,
        paths: Sequence[str] = (),
        allow_outside: bool = False,
        provenance: Provenance | None = None,
    ) -> None:
        check_policy(on_error, max_errors)
        super().__init__(
            table,
            modalities,
            memory=memory,
            root=root,
            source=source,
            targets=targets,
            paths=paths,
            allow_outside=allow_outside,
            files_must_exist=on_error == "raise",
            provenance=provenance,
        )
        self.on_error: OnError = on_error
        self.max_errors = max_errors
        self._encoders = {name: dict(settings) for name, settings in (encoders or {}).items()}
        self.failed = Failures(len(table), len(modalities))

    def __getitem__(self, key: int | tuple[int, int]) -> Sample | None:
        index, seed = key if isinstance(key, tuple) else (key, 0)
        row = int(self.rows[index])
        values = {}
        for column, name in enumerate(self.modalities):
            try:
                values[name] = self._decode(name, row)
            except FusionZooError as error:
                if not self._continue_without(row, name, error):
                    return None
                values[name] = None
            else:
                if values[name] is not None:
                    self.failed.note_tried(row, column)
        row_id, split = self._cell("id", row), self._cell("split", row)
        goes_on = partial(self._continue_without, row)
        return Sample(row_id, split, self._target(row), values, seed, goes_on)

    @property
    def default_encoders(self) -> dict[str, dict[str, Any]]:
        """The encoder of each modality, where the user names none."""
        return fill_encoders(self, self._encoders, self._width)

    def failures(self) -> list[tuple[str, str]]:
        """Return (id, modality) of every value that could not be used so far."""
        names = list(self.modalities)
        return [(self._cell("id", row), names[column]) for row, column in self.failed.cells()]

    # ---- views

    def split(self, name: str) -> PairedDataset:
        """Return the samples of one split."""
        if not len(chosen := rows_equal_to(self.chosen("split"), name)):
            counts = ", ".join(f"{key} ({count})" for key, count in self.splits.items())
            raise FusionZooError(
                f"{self.source}: split {name!r} is empty.{did_you_mean(name, self.splits)}"
                f" It has: {counts}"
            )
        return self.subset(chosen)

    def subset(self, indices: Sequence[int] | Tensor) -> PairedDataset:
        """Return some of the samples; the table is shared, not copied."""
        if isinstance(indices, str):
            raise FusionZooError(
                f"subset({indices!r}) takes numbers of samples: split({indices!r}) returns a split"
            )
        view = copy.copy(self)
        view.rows = self.rows[torch.as_tensor(indices)]
        return view

    def select(self, modalities: str | Sequence[str]) -> PairedDataset:
        """Keep some modalities (`"image,text"` or a list); samples left with none are dropped."""
        names = word_list(modalities)
        for name in names:
            self.check_modality(name)
        kinds = {name: kind for name, kind in self.modalities.items() if name in names}
        view = self._with(self.table, kinds)
        left_out = (name for name in self.modalities if name not in kinds)
        view.provenance = replace(
            view.provenance,
            deselected=(*self.provenance.deselected, *left_out),
            dropped=self.provenance.dropped + len(self) - len(view),
        )
        return view

    def only(self, modalities: str | Sequence[str]) -> PairedDataset:
        """Return the same samples with some modalities, those that lack them included."""
        names = [modalities] if isinstance(modalities, str) else list(modalities)
        for name in names:
            self.check_modality(name)
        view = copy.copy(self)
        view.modalities = {name: kind for name, kind in self.modalities.items() if name in names}
        view.failed = Failures(len(self.table), len(view.modalities))
        return view

    def with_targets(self, targets: Mapping[str, str]) -> PairedDataset:
        """Return the same samples with other columns as labels: `{"age": "regression"}`."""
        view = copy.copy(self)
        view._read_labels(targets)
        return view

    def _with(self, table: pa.Table, modalities: Mapping[str, str]) -> PairedDataset:
        """Return a view of another table's modalities, without samples that have none of them."""
        has_any = presence(table, modalities).any(1)
        rows = self.rows[has_any[self.rows]]
        if not len(rows):
            raise FusionZooError(f"{self.source}: no sample has {' or '.join(modalities)}")
        # A copy keeps the classes, and its files need no second check.
        view = copy.copy(self)
        view.table = table.filter(pa.array(has_any.numpy())).combine_chunks()
        view.label_values = self.label_values[has_any]
        view.modalities, view.rows = dict(modalities), (has_any.cumsum(0) - 1)[rows]
        view.failed = Failures(len(view.table), len(modalities))
        view.provenance = self.provenance.keep_rows(has_any.numpy())
        return view

    # ---- decoding

    def _decode(self, name: str, row: int) -> Any:
        reference = self.reference(name, row)
        if name in self.readers and reference is not None:
            return self.readers[name](row)
        return None if reference is None else decode(self.modalities[name], reference)

    def _continue_without(self, row: int, name: str, error: FusionZooError) -> bool:
        """Note a value that cannot be used; return whether its sample is used without it."""
        if self.on_error == "raise":
            raise FusionZooError(f"{self.sample_place(row)}, {name}: {error}") from error
        column = list(self.modalities).index(name)
        self.failed.note_failed(row, column, str(error))
        total = len(self.table) - self.table[name].null_count
        if self.failed.too_many(column, self.max_errors, total):
            raise self.failed.error(
                column,
                name,
                self.max_errors,
                source=self.source,
                sample_id=partial(self._cell, "id"),
                decode=partial(self._decode, name),
            ) from error
        return self.on_error == "missing"

    def _width(self, name: str) -> int:
        """Return the width of the first vector that can be read."""
        for row, valid in enumerate(self.table[name].is_valid().to_pylist()):
            try:
                if valid:
                    return int(self._decode(name, row).shape[-1])
            except FusionZooError:
                if self.on_error == "raise":
                    raise
        raise FusionZooError(f"{self.source}: no {name} can be read, so its width is unknown")
