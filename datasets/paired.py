"""Paired samples: a table of references, aligned by id, decoded when a sample is asked for."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import KINDS, Sample
from fusionzoo.targets import Target, sorted_words

from .failures import MAX_ERRORS, Failures, OnError
from .labels import read_labels
from .media import decode
from .paths import PathChecker
from .provenance import Provenance


class PairedDataset(Dataset[Sample | None]):
    """Samples with an id, a split, a target and, per modality, a value or nothing.

    `table` has string columns `id`, `split`, `target` (null: none) and a column per modality: a
    reference (path or text; null: the sample lacks the modality), or a row number into
    `memory[modality]`, values that are there already. `modalities` maps each to its kind.

    `targets` says what columns of labels hold, `{"age": "regression", "tags": "multilabel"}`, kinds
    of `fusionzoo.targets`. None: `target` holds the one class of every sample; an empty mapping:
    labels are not read.

    Cells of other kinds than text are paths below `root`; of text they are the text itself, unless
    `paths` names the modality. No path may leave `root`, links resolved, unless `allow_outside`;
    without a `root` paths start from the working directory, and may lead anywhere.

    `on_error` says what to do with a file that cannot be decoded: `raise` its error, take it for
    `missing`, or `skip` the sample; so too with a value that an encoder's processor refuses.
    `failures()` lists what was met, in workers too. Where more than a share `max_errors` of a
    modality's values cannot be used, one error says so (see `Failures.too_many`); 1 never does.
    """

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
        if on_error not in ("raise", "missing", "skip"):
            raise FusionZooError(f"on_error={on_error!r} is none of raise, missing, skip")
        if not 0 <= max_errors <= 1:
            raise FusionZooError(f"max_errors={max_errors}; it is a share, from 0 to 1")
        for name, kind in modalities.items():
            if kind not in KINDS:
                raise FusionZooError(f"{name} is of kind {kind!r}; kinds are {', '.join(KINDS)}")
        for name in paths:
            if name not in modalities:
                raise FusionZooError(
                    f"{source} has no modality {name!r} for --data.paths."
                    f"{did_you_mean(name, modalities)} It has: {', '.join(modalities)}"
                )
        self.table, self.modalities = table.combine_chunks(), dict(modalities)
        self.memory, self.root, self.source = dict(memory or {}), root, source
        self.paths = frozenset(name for name, kind in modalities.items() if kind != "text")
        self.paths |= frozenset(paths)
        self.allow_outside = allow_outside or root is None
        self.provenance = provenance or Provenance()
        self.on_error, self.max_errors = on_error, max_errors
        self._encoders = {name: dict(own) for name, own in (encoders or {}).items()}
        self.rows = torch.arange(len(table))
        self.failed = Failures(len(table), len(modalities))
        self._check_rows()
        self.scheme: tuple[Target, ...] | None = None  # what columns of labels hold
        self.numbers = torch.zeros(len(table), 0)  # their labels, (N, W)
        if targets is None:
            self.classes = self._find_classes()
            self.class_numbers = {label: number for number, label in enumerate(self.classes)}
        else:
            self._read_labels(targets)

    # ---- what it holds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | tuple[int, int]) -> Sample | None:
        index, seed = key if isinstance(key, tuple) else (key, 0)
        row = int(self.rows[index])
        values = {}
        for column, (name, kind) in enumerate(self.modalities.items()):
            try:
                values[name] = self._value(name, kind, row)
            except FusionZooError as error:
                if not self._goes_on(row, name, error):
                    return None
                values[name] = None
            else:
                if values[name] is not None:
                    self.failed.note_tried(row, column)
        about = self._cell("id", row), self._cell("split", row), self._target(row)
        return Sample(*about, values, seed, partial(self._goes_on, row))

    @property
    def ids(self) -> list[str]:
        """The samples' ids."""
        return self._column("id")

    @property
    def split_names(self) -> list[str]:
        """The samples' splits."""
        return self._column("split")

    @property
    def labels(self) -> list[str | None]:
        """The samples' targets, in words."""
        return self._column("target")

    @property
    def targets(self) -> Tensor:
        """Indices into `classes`, int64 (N,); with a `scheme` its numbers, float32 (N, W)."""
        if self.scheme is not None:
            return self.numbers[self.rows]
        if not self.classes:
            raise FusionZooError(f"{self.source} has no target column")
        numbers = [self.class_numbers[str(label)] for label in self.labels]
        return torch.tensor(numbers, dtype=torch.int64)

    @property
    def groups(self) -> list[str]:
        """What folds must not tear apart: the table's column `group`, else each sample alone."""
        return self._column("group" if "group" in self.table.column_names else "id")

    @property
    def present(self) -> Tensor:
        """What the table says each sample has, bool (N, M)."""
        columns = [self.table[name].is_valid().to_numpy() for name in self.modalities]
        return torch.stack([torch.tensor(column) for column in columns], dim=1)[self.rows]

    @property
    def splits(self) -> dict[str, int]:
        """How many samples each split has."""
        return dict(Counter(self.split_names))

    @property
    def default_encoders(self) -> dict[str, dict[str, Any]]:
        """The encoder that each modality gets where the user names none."""
        usual: dict[str, dict[str, Any]] = {
            "image": {"name": "timm/resnet18"},
            "text": {"name": "hf/sentence-transformers/all-MiniLM-L6-v2"},
            "audio": {"name": "mel/resnet18"},
            "vector": {"name": "vector/mlp"},
            "sequence": {"name": "sequence/transformer"},
        }
        chosen = {
            name: dict(self._encoders.get(name, usual[k])) for name, k in self.modalities.items()
        }
        for name, kind in self.modalities.items():
            if kind in ("vector", "sequence"):
                chosen[name].setdefault("in_dim", self._width(name, kind))
        return chosen

    def lengths(self) -> Tensor:
        """Return a rough cost per sample, for batches of similar lengths: text, clip, steps."""
        total = torch.zeros(len(self.table), dtype=torch.float64)
        for name, kind in self.modalities.items():
            if kind in ("text", "audio", "sequence"):
                own = torch.tensor([self._length(name, kind, row) for row in range(len(total))])
                total += own.double() / own.double().mean().clamp(min=1e-9)
        return total[self.rows]

    def by_length(self) -> list[int]:
        """Return the samples' positions, the longest first, those without any modality last."""
        return self.lengths().argsort(descending=True, stable=True).tolist()

    def references(self, modality: str) -> list[Any]:
        """Return what each sample refers to, undecoded: a path, text, a value, or None."""
        return [self.reference(modality, row) for row in self.rows.tolist()]

    def failures(self) -> list[tuple[str, str]]:
        """Return (id, modality) of every value that could not be used so far."""
        names = list(self.modalities)
        return [(self._cell("id", row), names[column]) for row, column in self.failed.cells()]

    # ---- other views of it

    def split(self, name: str) -> PairedDataset:
        """Return the samples of one split."""
        chosen = [i for i, own in enumerate(self.split_names) if own == name]
        if not chosen:
            has = ", ".join(f"{key} ({count})" for key, count in self.splits.items())
            raise FusionZooError(
                f"{self.source}: split {name!r} is empty.{did_you_mean(name, self.splits)}"
                f" It has: {has}"
            )
        return self.subset(chosen)

    def subset(self, indices: Sequence[int] | Tensor) -> PairedDataset:
        """Return some of the samples; the table is shared, not copied."""
        view = copy.copy(self)
        view.rows = self.rows[torch.as_tensor(indices)]
        return view

    def select(self, modalities: str | Sequence[str]) -> PairedDataset:
        """Keep some modalities (`"image,text"` or a list); samples left with none are dropped."""
        names = word_list(modalities)
        for name in names:
            if name not in self.modalities:
                raise FusionZooError(
                    f"{self.source} has no modality {name!r}.{did_you_mean(name, self.modalities)}"
                    f" It has: {', '.join(self.modalities)}"
                )
        keep = {name: kind for name, kind in self.modalities.items() if name in names}
        view = self._with(self.table, keep)
        before = self.provenance
        view.provenance = replace(
            before,
            deselected=(
                *before.deselected,
                *(name for name in self.modalities if name not in keep),
            ),
            dropped=before.dropped + len(self) - len(view),
        )
        return view

    def only(self, modality: str) -> PairedDataset:
        """Return the same samples with one modality, those that lack it included."""
        if modality not in self.modalities:
            self.select(modality)  # names what there is
        view = copy.copy(self)
        view.modalities = {modality: self.modalities[modality]}
        view.failed = Failures(len(self.table), 1)
        return view

    def drop(self, rate: float, seed: int = 0) -> PairedDataset:
        """Remove a share `rate` of each modality at random (mcar), always the same for one seed.

        A sample that would lose everything keeps what its id's hash chooses.
        """
        if not 0 <= rate < 1:
            raise FusionZooError(f"missing={rate}; it must be at least 0 and below 1")
        draw = torch.Generator().manual_seed(seed)
        size = (len(self.table), len(self.modalities))
        before = torch.stack(
            [torch.tensor(self.table[name].is_valid().to_numpy()) for name in self.modalities],
            dim=1,
        )
        order = torch.rand(size, generator=draw)
        kept = before & (torch.rand(size, generator=draw) >= rate)
        saved = order.masked_fill(~before, 2.0).argmin(1)
        kept[torch.arange(size[0]), saved] |= ~kept.any(1)
        table = self.table
        for column, name in enumerate(self.modalities):
            mask = pa.array(kept[:, column].numpy())
            values = pc.if_else(mask, table[name], pa.scalar(None, table[name].type))
            table = table.set_column(table.column_names.index(name), name, values)
        return self._with(table, self.modalities)

    def with_targets(self, targets: Mapping[str, str]) -> PairedDataset:
        """Return the same samples with other columns as labels: `{"age": "regression"}`."""
        view = copy.copy(self)
        view._read_labels(targets)
        return view

    @classmethod
    def join(
        cls, sources: Mapping[str, PairedDataset], how: Literal["inner", "outer"] = "inner"
    ) -> PairedDataset:
        """Pair separate sources by id: `join({"image": photos, "audio": clips}, how="outer")`.

        Each source gives the modality it is named after, or its only one. `inner` keeps the ids
        that all have; `outer` keeps all, with modalities missing. Splits and targets must agree.
        """
        from .join import join

        return join(sources, how)

    # ---- inside

    def _goes_on(self, row: int, name: str, error: FusionZooError) -> bool:
        """Note a value that cannot be used; say whether its sample goes on without it."""
        if self.on_error == "raise":
            where = f"{self.source}, sample {self._cell('id', row)!r}, {name}"
            raise FusionZooError(f"{where}: {error}") from error
        column = list(self.modalities).index(name)
        self.failed.note_failed(row, column, str(error))
        total = len(self.table) - self.table[name].null_count
        if self.failed.too_many(column, self.max_errors, total):
            raise self._too_many(name, column) from error
        return self.on_error == "missing"

    def _too_many(self, name: str, column: int) -> FusionZooError:
        failed, tried = self.failed.counts(column)
        rows = [row for row, other in self.failed.cells() if other == column][:5]
        first = "; ".join(
            f"{self._cell('id', row)!r} ({name}): {self._reason(row, name, column)}" for row in rows
        )
        return FusionZooError(
            f"{self.source}: {failed} of {tried} values of {name} tried so far cannot be used, more"
            f" than --data.max_errors {self.max_errors:g} allows. The first: {first}"
        )

    def _reason(self, row: int, name: str, column: int) -> str:
        """Return why a value failed; one that another process met is decoded again."""
        known = self.failed.reason(row, column)
        if known is not None:
            return known
        try:
            self._value(name, self.modalities[name], row)
        except FusionZooError as error:
            return str(error)
        return "refused by its encoder"

    def _read_labels(self, targets: Mapping[str, str]) -> None:
        found = read_labels(self.table, targets, self.source, list(self.modalities))
        self.classes, (self.scheme, self.numbers) = [], found

    def _target(self, row: int) -> int | tuple[float, ...] | None:
        if self.scheme is not None:
            return tuple(self.numbers[row].tolist())
        return self.class_numbers[self._cell("target", row)] if self.classes else None

    def _with(self, table: pa.Table, modalities: Mapping[str, str]) -> PairedDataset:
        valid = [torch.tensor(table[name].is_valid().to_numpy()) for name in modalities]
        kept = torch.stack(valid, dim=1).any(1)
        rows = self.rows[kept[self.rows]]
        if not len(rows):
            raise FusionZooError(f"{self.source}: no sample has {' or '.join(modalities)}")
        # A copy, not a new data set: its files are checked, and its classes stay what they are.
        out = copy.copy(self)
        out.table = table.filter(pa.array(kept.numpy())).combine_chunks()
        out.numbers = self.numbers[kept]
        out.modalities, out.rows = dict(modalities), (kept.cumsum(0) - 1)[rows]
        out.failed = Failures(len(out.table), len(modalities))
        return out

    def _cell(self, column: str, row: int) -> Any:
        return self.table[column][row].as_py()

    def _column(self, name: str) -> list[Any]:
        return self.table[name].take(pa.array(self.rows.numpy())).to_pylist()

    def reference(self, name: str, row: int) -> Any:
        """Return what a row of the table refers to, undecoded: a path, text, a value, or None."""
        reference = self._cell(name, row)
        if reference is None:
            return None
        if name in self.memory:
            return self.memory[name][reference]
        is_path = name in self.paths and isinstance(reference, str)
        return (self.root or Path()) / reference if is_path else reference

    def _value(self, name: str, kind: str, row: int) -> Any:
        reference = self.reference(name, row)
        return None if reference is None else decode(kind, reference)

    def _length(self, name: str, kind: str, row: int) -> float:
        value = self.reference(name, row)
        if value is None:
            return 0.0
        if isinstance(value, Path):
            return float(value.stat().st_size) if value.is_file() else 0.0
        return float(len(value[0] if kind == "audio" else value))

    def _width(self, name: str, kind: str) -> int:
        """Return the width of the first vector that can be read."""
        for row, valid in enumerate(self.table[name].is_valid().to_pylist()):
            try:
                if valid:
                    return int(self._value(name, kind, row).shape[-1])
            except FusionZooError:
                if self.on_error == "raise":
                    raise
        raise FusionZooError(f"{self.source}: no {name} can be read, so its width is unknown")

    def _check_rows(self) -> None:
        if not len(self.table):
            raise FusionZooError(f"{self.source} has no rows")
        if self.table["id"].null_count:
            row = self.table["id"].is_null().to_pylist().index(True)
            raise FusionZooError(f"{self.source}, row {row + 1}: the id is empty")
        twice = [key for key, count in Counter(self.table["id"].to_pylist()).items() if count > 1]
        if twice:
            raise FusionZooError(
                f"{self.source}: id {twice[0]!r} stands {self._count(twice[0])} times"
            )
        bare = (~self.present.any(1)).nonzero()[:, 0].tolist()
        if bare:
            where = f"row {bare[0] + 1}, sample {self._cell('id', bare[0])!r}"
            raise FusionZooError(f"{self.source}, {where}: every modality is empty")
        self._check_paths()

    def _check_paths(self) -> None:
        """Refuse paths that leave the folder and, unless `on_error` forgives them, no files."""
        must_exist = self.on_error == "raise"
        if self.allow_outside and not must_exist:
            return
        checker = PathChecker(
            self.root or Path(), allow_outside=self.allow_outside, must_exist=must_exist
        )
        for name in self.modalities:
            is_text = pa.types.is_string(self.table[name].type)
            if name in self.memory or name not in self.paths or not is_text:
                continue
            for row, cell in enumerate(self.table[name].to_pylist()):
                problem = checker.problem(cell) if cell is not None else ""
                if problem:
                    where = f"{self.source}, row {row + 1}, sample {self._cell('id', row)!r}"
                    raise FusionZooError(f"{where}: {name} {problem}")

    def _count(self, key: str) -> int:
        return self.table["id"].to_pylist().count(key)

    def _find_classes(self) -> list[str]:
        """Sort the training split's labels; numbers as numbers. No target column, no classes."""
        labels, splits = self.table["target"].to_pylist(), self.table["split"].to_pylist()
        if all(label is None for label in labels):
            return []
        known = {x for x, split in zip(labels, splits, strict=True) if split == "train"} or set(
            labels
        )
        for row, label in enumerate(labels):
            if label is None or label not in known:
                what = "no target" if label is None else f"the label {label!r}, which no sample of"
                rest = "" if label is None else " split 'train' has"
                raise FusionZooError(
                    f"{self.source}, row {row + 1}, sample {self._cell('id', row)!r} (split"
                    f" {splits[row]!r}) has {what}{rest}"
                )
        return sorted_words({str(label) for label in known})


def word_list(words: str | Sequence[str]) -> list[str]:
    """Return the words of `a, b`, or of a list.

    >>> word_list("image, text")
    ['image', 'text']
    """
    return [word.strip() for word in (words.split(",") if isinstance(words, str) else words)]
