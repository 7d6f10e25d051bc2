"""Paired samples: a table of references, aligned by id and decoded on access."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fusionzoo.errors import (
    FusionZooError,
    check_known,
    check_number,
    did_you_mean,
    list_names,
    located,
    value_named,
)
from fusionzoo.structures import Sample
from fusionzoo.targets import OneOf, Target, label_word

from .amputation import Mechanism, amputated, drop_values
from .export import write_manifest
from .failures import MAX_ERRORS, Failures, OnError, check_policy
from .join import How, join_arguments
from .media.arrays import refer
from .media.audio import cost, cut
from .media.decode import decode
from .media.ranges import Ranges, range_of, shown
from .shards.order import Blocking, find_blocking, sort_by_window, stored_lengths
from .shown import as_html, as_text
from .sources.infer import objective_hint
from .tables.arrow import (
    ArrowColumn,
    cell_lengths,
    count_values,
    positions_in,
    rows_equal_to,
)
from .tables.paths import (
    PathChecker,
    check_ids,
    check_paths,
    holds_paths,
    is_collecting,
    labels_of_join,
    refuse,
)
from .tables.provenance import Amputation, Provenance, RowNumbers
from .tables.splits import (
    class_columns,
    describe_shares,
    hold_out,
    make_splits,
    random_splits,
    renamed_splits,
    usual_splits,
)
from .tables.table import (
    EDGES,
    NOT_FILES,
    Samples,
    check_modalities,
    check_positive,
    find_classes,
    positive_last,
    presence,
    read_labels,
    read_weights,
    word_list,
)
from .tables.tabular import learn_columns

SHOWN = 9  # splits in a message: more of them are none
DEFAULT_ENCODERS: dict[str, dict[str, Any]] = {  # by kind of modality
    "image": {"name": "timm/resnet18"},
    "text": {"name": "hf/sentence-transformers/all-MiniLM-L6-v2"},
    "audio": {"name": "mel/resnet18"},
    "vector": {"name": "vector/mlp"},
    "sequence": {"name": "sequence/transformer"},
    "tabular": {"name": "tabular/tabm", "numbers": "piecewise", "bins": 48},
}


class PairedDataset(Dataset[Sample | None]):
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

    `image_range` has the values that are black and white in images of 16 or 32 bits, of all
    modalities or by name.

    `sample_rate` is that of audio in arrays, in Hz; `frames` are the images taken of a video, by
    default `audio.FRAMES`.

    `positive` is the second of two classes, for what is measured or answered by a threshold.

    `weight_column` names a column of the table that says how much each sample counts in losses and
    metrics, as scikit-learn's `sample_weight`: finite numbers of at least 0.
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
        image_range: Ranges = None,
        encoders: Mapping[str, Mapping[str, Any]] | None = None,
        targets: Mapping[str, str] | None = None,
        positive: str | bool | int | None = None,
        paths: Sequence[str] = (),
        allow_outside: bool = False,
        provenance: Provenance | None = None,
        sample_rate: int | None = None,
        frames: int | None = None,
        weight_column: str | None = None,
    ) -> None:
        check_policy(on_error, max_errors)
        check_modalities(modalities, paths, source)
        self.table, self.modalities = table.combine_chunks(), dict(modalities)
        self.memory, self.root, self.source = dict(memory or {}), root, source
        self.paths = frozenset(name for name, kind in modalities.items() if kind not in NOT_FILES)
        self.paths |= frozenset(paths)
        self.allow_outside = allow_outside or root is None
        self.provenance = provenance or Provenance()
        self.rows = torch.arange(len(table))
        self.readers: dict[str, Callable[[int], Any]] = {}
        self.edits: tuple[Callable[[Sample], Sample | None], ...] = ()
        self.on_error: OnError = on_error
        self.max_errors = max_errors
        self.image_range = image_range
        self.sample_rate, self.frames = sample_rate, frames
        self._encoders = {name: dict(settings) for name, settings in (encoders or {}).items()}
        self.failed = Failures(len(table), len(modalities))
        self._check_rows()
        if is_collecting():
            targets = {}  # the audit reads the column `target` itself
        self.scheme: tuple[Target, ...] | None = None  # of label columns; None: column `target`
        self.label_values = torch.zeros(len(table), 0)  # of label columns, float32 (N, W)
        self.positive = None if positive is None else label_word(positive)
        if targets is None:
            self._find_classes()
        else:
            self._read_labels(targets)
        if self.positive is not None:
            scheme: Sequence[Target] = self.scheme or ()
            of_columns = [x.classes for x in scheme if isinstance(x, OneOf)]
            check_positive(self.positive, of_columns or [self.classes], self.source)
        self.weight_column = None if is_collecting() else weight_column
        self.weight_values = torch.zeros(len(self.table))  # of the column, float32 (rows,)
        if self.weight_column is not None:
            self.weight_values = read_weights(self.table, self.weight_column, self.sample_place)

    def __len__(self) -> int:
        return len(self.rows)

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
        weight = None if self.weight_column is None else float(self.weight_values[row])
        target = self._target(row)
        sample: Sample | None = Sample(row_id, split, target, values, seed, goes_on, weight)
        for edit in self.edits:
            sample = sample and edit(sample)
        return sample

    @property
    def default_encoders(self) -> dict[str, dict[str, Any]]:
        """The encoder of each modality, where the user names none, with what follows from the
        data."""
        encoders = {}
        for name, kind in self.modalities.items():
            encoders[name] = settings = dict(self._encoders.get(name, DEFAULT_ENCODERS[kind]))
            if kind in ("vector", "sequence"):
                settings.setdefault("in_dim", self._width(name))
            if kind == "tabular" and "columns" not in settings:
                settings["columns"] = learn_columns(self, name, settings.get("bins", 0))
        return encoders

    def failures(self) -> list[tuple[str, str]]:
        """Return (id, modality) of every value that could not be used so far."""
        names = list(self.modalities)
        return [(self._cell("id", row), names[column]) for row, column in self.failed.cells()]

    # ---- columns

    @property
    def ids(self) -> list[str]:
        """The samples' ids."""
        return self.column("id")

    @property
    def table_ids(self) -> list[str]:
        """The ids as the table has them: of new data, several samples may share one."""
        names = self.provenance.repeated_ids
        return [names.get(x, x) for x in self.ids] if names else self.ids

    @property
    def split_names(self) -> list[str]:
        """The samples' splits."""
        return self.column("split")

    @property
    def splits(self) -> dict[str, int]:
        """The number of samples in each split."""
        return count_values(self.chosen("split"))

    @property
    def labels(self) -> list[str | None]:
        """The samples' targets as text."""
        return self.column("target")

    @property
    def groups(self) -> list[str]:
        """The samples' groups, which folds keep together: column `group`, else the id."""
        return self.column("group" if "group" in self.table.column_names else "id")

    @property
    def weights(self) -> Tensor | None:
        """How much each sample counts, float32 (N,), at least 0; None without `weight_column`."""
        return None if self.weight_column is None else self.weight_values[self.rows]

    @property
    def targets(self) -> Tensor:
        """Indices into `classes`, int64 (N,); with a `scheme` the label values, float32 (N, W)."""
        if self.scheme is not None:
            return self.label_values[self.rows]
        if not self.classes:
            raise FusionZooError(f"{self.source} has no target column")
        return positions_in(self.chosen("target"), self.classes)

    @property
    def present(self) -> Tensor:
        """Which modalities each sample has, according to the table, bool (N, M)."""
        return presence(self.table, self.modalities)[self.rows]

    def where(self, row: int) -> str:
        """Return the place of a row of the table for messages: `file.csv, row 7`."""
        numbers = self.provenance.row_numbers
        return f"{self.source}, row {numbers.number(row)}" if numbers else self.source

    @property
    def places(self) -> list[int] | None:
        """Positions of the samples among the rows of their source; None: of several sources."""
        numbers = self.provenance.row_numbers
        if numbers is None:
            return None
        rows = self.rows.numpy()
        return (rows if numbers.positions is None else numbers.positions[rows]).tolist()

    def sample_place(self, row: int) -> str:
        """Return `where` with the id of the row's sample."""
        return f"{self.where(row)}, sample {self._cell('id', row)!r}"

    def check_modality(self, name: str) -> None:
        """Raise an error that lists the modalities, if there is none of this name."""
        check_known(name, self.modalities, f"{self.source} has no modality {name!r}")

    def references(self, modality: str) -> list[Any]:
        """Return each sample's undecoded value: a path, text, a value from memory, or None."""
        return [self.reference(modality, row) for row in self.rows.tolist()]

    def reference(self, name: str, row: int) -> Any:
        """Return the undecoded value in a row of the table, see `references`."""
        cell, kind = self._cell(name, row), self.modalities[name]
        if cell is None:
            return None
        if name in self.memory:
            value = self.memory[name][cell]
        elif name not in self.paths:
            return cell
        elif kind == "text":
            return (self.root or Path()) / cell if isinstance(cell, str) else cell
        else:
            value = refer(cell, kind, self.root, self.sample_rate)
        if kind not in ("image", "audio"):
            return value
        start, end = (self._edge(f"{name}_{edge}", row) for edge in EDGES)
        return cut(kind, value, start, end, self.frames)

    def column(self, name: str) -> list[Any]:
        """Return the samples' cells of a column of the table."""
        return self.chosen(name).to_pylist()

    def chosen(self, name: str) -> ArrowColumn:
        """Return the samples' cells of a column of the table."""
        return self.table[name].take(pa.array(self.rows.numpy()))

    # ---- order

    def lengths(self) -> Tensor:
        """Return a rough cost per sample, from the sizes of its text, audio and sequences."""
        total = torch.zeros(len(self.table), dtype=torch.float64)
        for name, kind in self.modalities.items():
            counts = getattr(self.memory.get(name), "counts", None)  # of items in shards
            has_lists = counts is not None or pa.types.is_list(self.table[name].type)
            if kind in ("text", "audio", "sequence") or (kind == "image" and has_lists):
                sizes = _sizes(self, name, kind)
                total += sizes / sizes.mean().clamp(min=1e-9)
        return total[self.rows]

    def by_length(self) -> list[int]:
        """Return the samples' positions, the longest first; in shards, the longest of a window."""
        order, blocking = self.lengths().argsort(descending=True, stable=True), self.blocking()
        if blocking is not None:
            order = sort_by_window(order, blocking.windows(torch.arange(len(self)), None))
        return order.tolist()

    def blocking(self) -> Blocking | None:
        """Return the blocks of shards that the samples are in; None: they are in none."""
        return find_blocking(self)

    # ---- views

    def split(self, name: str) -> PairedDataset:
        """Return the samples of one split."""
        if not len(chosen := rows_equal_to(self.chosen("split"), name)):
            counts = [f"{key:.40} ({count})" for key, count in self.splits.items()]
            advice = "; if column 'split' is an input, --data.kinds.split says what it holds"
            raise FusionZooError(
                f"{self.source}: split {name!r} is empty.{did_you_mean(name, self.splits)}"
                f" It has: {list_names(counts[:SHOWN])}{advice if len(counts) > SHOWN else ''}"
            )
        return self.subset(chosen)

    def subset(self, indices: Sequence[int] | Tensor) -> PairedDataset:
        """Return some of the samples; the table is shared, not copied."""
        view = copy.copy(self)
        view.rows = self.rows[torch.as_tensor(indices)]
        return view

    def whole(self) -> PairedDataset:
        """Return all samples of the table that these are of."""
        view = copy.copy(self)
        view.rows = torch.arange(len(self.table))
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

    def with_policy(
        self,
        *,
        on_error: OnError | None = None,
        max_errors: float | None = None,
        image_range: Ranges = None,
    ) -> Self:
        """Return the same samples, read by other rules; None leaves a rule as it is."""
        view = copy.copy(self)
        view.on_error = self.on_error if on_error is None else on_error
        view.max_errors = self.max_errors if max_errors is None else max_errors
        if image_range is not None:
            view.image_range = image_range
            note = f"images of 16 or 32 bits {shown(image_range)} (--data.image_range)"
            reading = (*self.provenance.reading, note)
            view.provenance = replace(self.provenance, reading=reading)
        check_policy(view.on_error, view.max_errors)
        return view

    def read_as(self, stored: Mapping[str, Any]) -> Self:
        """Return the same samples, whose images have the range of other settings of data, unless
        they have one."""
        ranges = stored.get("image_range")
        return self if self.image_range or not ranges else self.with_policy(image_range=ranges)

    def read_by(self, readers: Mapping[str, Callable[[int], Any]]) -> Self:
        """Return the same samples; values of some modalities are not decoded, but read by row of
        the table."""
        view = copy.copy(self)
        view.readers = dict(readers)
        return view

    def edited(self, edit: Callable[[Sample], Sample | None]) -> Self:
        """Return the same samples, each as `edit(sample)` returns it; None skips the sample.

        Edits of an edited view come one after another. They change what is decoded, not what is
        stored: `references`, lengths and the statistics of encoders stay those of the original, and
        joining, storing or caching an edited view is an error. A `DataLoader` that starts its
        workers anew needs an `edit` that can be pickled: a function of a module, not a lambda.
        """
        view = copy.copy(self)
        view.edits = (*self.edits, edit)
        return view

    def hold_out(self, share: float) -> Self:
        """Return the same samples, with a share of those in `train` in `val`, which must be empty.

        Whole groups are moved, of each class the same share; which they are depends on a hash.
        """
        if not 0 < share < 1:
            raise FusionZooError(f"val_share={share}; it must be above 0 and below 1")
        if "val" in self.splits:
            raise FusionZooError(f"{self.source} has a val split: leave out --data.val_share")
        table, key, kinds = self.table, self._split_key, self._kinds_of_targets
        known = {name: table[name] for name in kinds if name in table.column_names}
        made = hold_out(table["split"], table[key], class_columns(known, kinds), share)
        rule = f"{100 * share:.3g} % of train held out as val by a hash of the {key}{made.rule}"
        before = self.provenance.split_rule
        return self._with_splits(made.splits, f"{before}; {rule}" if before else rule)

    def split_by_labels(self, kinds: Mapping[str, str]) -> Self:
        """Return the same samples, with the splits by hash that training on these labels has.

        `kinds` says what their columns hold, in the order of training. The splits have the same
        shares of each class; those of data whose labels were not asked for have not. Splits of
        another origin stay, and so do those of data without one of the columns.
        """
        shares, key = self.provenance.split_shares, self._split_key
        if shares is None or not kinds.keys() <= {*self.table.column_names}:
            return self
        labels = class_columns({name: self.table[name] for name in kinds}, kinds)
        made = make_splits(self.table[key], labels, shares, unique=key == "id")
        return self._with_splits(made.splits, self.provenance.split_rule, shares)

    def draw_splits(self, seed: int, shares: Sequence[float]) -> Self:
        """Return the same samples, with splits drawn at random, whole groups."""
        drawn = random_splits(self.table[self._split_key], shares, seed)
        rule = f"drawn at random with seed {seed}: {describe_shares(shares)}"
        return self._with_splits(drawn, rule)

    def with_splits(self, split_of: Mapping[str, str], source: str) -> Self:
        """Return the samples that `split_of` lists, with these splits; `source` names the list."""
        ids = self.table["id"].to_pylist()
        unknown = split_of.keys() - set(ids)
        if unknown:
            first = min(unknown)
            raise FusionZooError(
                f"{source}: id {first!r} is not in {self.source}.{did_you_mean(first, ids)}"
                f" Its ids are like {ids[0]!r}"
            )
        in_list = torch.tensor([key in split_of for key in ids])
        view = self._keep(in_list)
        if view.classes:
            view._find_classes()
        splits, renamed = usual_splits(pa.array([split_of[key] for key in ids if key in split_of]))
        rule = source + renamed_splits(renamed)
        if len(splits) < len(ids):
            rule += f", which leaves out {len(ids) - len(splits):,} samples"
        return view._with_splits(splits, rule)

    @property
    def _split_key(self) -> str:
        """The column of which equal cells share a split."""
        return "group" if "group" in self.table.column_names else "id"

    @property
    def _kinds_of_targets(self) -> dict[str, str]:
        if self.scheme is None:
            return {"target": "classification"}
        return {target.name: target.kind for target in self.scheme}

    def _with_splits(
        self, splits: pa.Array, rule: str, shares: tuple[float, ...] | None = None
    ) -> Self:
        view, table = copy.copy(self), self.table
        column = table.column_names.index("split")
        view.table = table.set_column(column, "split", splits).combine_chunks()
        if self.scheme:
            view._read_labels(self._kinds_of_targets)  # their statistics are of the training split
        view.provenance = replace(self.provenance, split_rule=rule, split_shares=shares)
        return view

    def drop(self, rate: float, seed: int = 0) -> Self:
        """Remove a share `rate` of each modality at random (MCAR), always the same for one seed.

        A sample that would lose everything keeps one value, chosen at random. Each value is drawn
        independently, so the share is met on average; `amputate` meets it exactly.
        """
        check_number("missing", rate, 0, 1)
        table = drop_values(self.table, self.modalities, rate, seed)
        return self._removed(table, Amputation("mcar", rate, seed, tuple(self.modalities)))

    def amputate(
        self,
        mechanism: Mechanism = "mcar",
        *,
        rate: float,
        seed: int = 0,
        modalities: str | Sequence[str] | None = None,
        depends_on: str | None = None,
    ) -> Self:
        """Remove a share `rate` of the values of each of `modalities`; no sample loses all of them.

        The probability that a value is removed is, by mechanism:

        - `mcar`: the same for all;
        - `mar`: rising with `depends_on`: the `label` (number of its class, or first target) or the
          quantity of a modality that stays complete; by default the label, if there is one;
        - `mnar`: rising with the value's own quantity.

        The quantity of a text is its length, of an image its brightness, of a clip its RMS level,
        of an array the mean of its absolute entries. The share is met to a single value in the
        samples of this view; `Provenance.amputations` and the data summary record what was removed.
        """
        table, record = amputated(self, mechanism, rate, seed, modalities, depends_on)
        return self._removed(table, record)

    # ---- exchange

    @classmethod
    def join(
        cls, sources: Mapping[str, Self], how: How = "inner", on: str | Mapping[str, str] = "id"
    ) -> Self:
        """Pair separate sources by id: `join({"image": photos, "audio": clips}, how="outer")`.

        A source gives the modality it is named after, or its only one under its own name, else all.
        `inner` keeps the ids that all have, `left` those of the first source, `outer` all, with
        modalities missing. Splits and targets must agree; splits of a column come before those made
        by a hash.

        `on` is another column to join on, or one for each source, and then one source may have
        several samples for each sample of the others: `join({"photo": a, "review": b},
        on="product")`. Ids are that source's; samples of one product are a group.
        """
        if not isinstance(sources, Mapping) or not all(
            isinstance(source, PairedDataset) for source in sources.values()
        ):
            raise FusionZooError('join takes data sets by name: {"photos": photos, "clips": clips}')
        return cls(**join_arguments(sources, how, on))

    def to_manifest(self, path: str | os.PathLike[str], *, embed: bool = False) -> dict[str, Any]:
        """Write the samples as a manifest; return the settings that open it.

        Its suffix is .parquet, .jsonl, .csv or .tsv. Files are referenced relative to the manifest,
        or in Parquet with `embed` copied into it. Values in memory need Parquet, except for text.
        `create_dataset(**ds.to_manifest("a.csv"))` opens the same samples; of Parquet files the
        path is enough.
        """
        return write_manifest(self, Path(path), embed)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    # ---- making views

    def _removed(self, table: pa.Table, record: Amputation) -> Self:
        view = self._with(table, self.modalities)
        amputations = (*self.provenance.amputations, record)
        view.provenance = replace(self.provenance, amputations=amputations)
        return view

    def _with(self, table: pa.Table, modalities: Mapping[str, str]) -> Self:
        """Return a view of another table's modalities, without samples that have none of them."""
        view = copy.copy(self)
        view.table, view.modalities = table, dict(modalities)
        has_any = presence(table, modalities).any(1)
        if not has_any[self.rows].any():
            raise FusionZooError(f"{self.source}: no sample has {' or '.join(modalities)}")
        return view._keep(has_any)

    def _keep(self, mask: Tensor) -> Self:
        """Return a view of the table's rows where `mask` is true."""
        # A copy keeps the classes, and its files need no second check.
        view = copy.copy(self)
        view.table = self.table.filter(pa.array(mask.numpy())).combine_chunks()
        view.label_values = self.label_values[mask]
        view.weight_values = self.weight_values[mask]
        view.rows = (mask.cumsum(0) - 1)[self.rows[mask[self.rows]]]
        view.failed = Failures(len(view.table), len(self.modalities))
        numbers = self.provenance.row_numbers
        kept = numbers and numbers.keep(mask.numpy())
        view.provenance = replace(self.provenance, row_numbers=kept)
        return view

    # ---- decoding

    def _cell(self, column: str, row: int) -> Any:
        return self.table[column][row].as_py()

    def _edge(self, column: str, row: int) -> float | None:
        """Return where a value starts or ends in seconds; None: it is not limited."""
        place = self.table.schema.get_field_index(column)
        if place < 0 or not pa.types.is_float64(self.table.schema.field(place).type):
            return None
        seconds = self.table.column(place)[row].as_py()
        return None if seconds is None or math.isnan(seconds) else seconds

    def decode(self, name: str, value: Any) -> Any:
        """Decode a value of a modality, as `Sample` describes; see `reference`."""
        return decode(self.modalities[name], value, range_of(self.image_range, name))

    def _decode(self, name: str, row: int) -> Any:
        reference = self.reference(name, row)
        if name in self.readers and reference is not None:
            return self.readers[name](row)
        with value_named(lambda: f"{self.sample_place(row)}, {name}"):
            return None if reference is None else self.decode(name, reference)

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

    # ---- checks

    def _check_rows(self) -> None:
        """Refuse ids that are empty or there twice, paths that lead out of the folder or to no
        file, and samples without a value."""
        if not len(self.table):
            raise FusionZooError(f"{self.source} has no rows")
        numbers = self.provenance.row_numbers or RowNumbers()
        self.table = check_ids(self.table, self.where, numbers)
        files = {
            name: kind
            for name, kind in self.modalities.items()
            if name in self.paths - self.memory.keys() and holds_paths(kind, self.table[name].type)
        }
        must_exist = self.on_error == "raise" and not is_collecting()
        checker = PathChecker(
            self.root or Path(), allow_outside=self.allow_outside, must_exist=must_exist
        )
        self.table = check_paths(self.table, files, checker, self.sample_place)
        empty = (~self.present.any(1)).nonzero()[:, 0].tolist()
        for row in empty if labels_of_join() is None else ():
            with located(partial(self.sample_place, row)):
                refuse("every modality is empty", "empty_sample", row=row)

    def _find_classes(self) -> None:
        missing = self.provenance.missing_labels.get("target", "")
        classes = find_classes(self.table, self.where, missing, objective_hint)
        self.classes = positive_last(classes, self.positive)
        self.class_indices = {label: index for index, label in enumerate(self.classes)}

    def _read_labels(self, targets: Mapping[str, str]) -> None:
        labels = read_labels(
            self.table,
            targets,
            self.source,
            list(self.modalities),
            where=self.where,
            missing=self.provenance.missing_labels,
            positive=self.positive,
        )
        self.classes, (self.scheme, self.label_values) = [], labels

    def _target(self, row: int) -> int | tuple[float, ...] | None:
        if self.scheme is not None:
            return tuple(self.label_values[row].tolist())
        return self.class_indices[self._cell("target", row)] if self.classes else None


def _sizes(dataset: Samples, name: str, kind: str) -> Tensor:
    """Return the size of each value of a modality, float64 (rows of the table,)."""
    is_plain = name not in dataset.memory and not (name in dataset.paths and kind == "text")
    is_list = kind == "sequence" and not pa.types.is_string(dataset.table[name].type)
    is_list |= kind == "image"  # here only if a sample may have several
    sizes = cell_lengths(dataset.table[name]) if is_plain and (kind == "text" or is_list) else None
    if sizes is not None:
        return sizes
    known = stored_lengths(dataset, name)
    if known is not None:
        return known
    rows = range(len(dataset.table))
    costs = [cost(dataset.reference(name, row)) for row in rows]
    return torch.tensor(costs, dtype=torch.float64)
