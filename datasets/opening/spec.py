"""A data set as its user names it, from a name, a path or a table to a `PairedDataset`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fusionzoo.ground.console import print_table

from ..tables.provenance import LoadedTable
from .naming import IN_MEMORY, resolve_name, settings_of

if TYPE_CHECKING:
    from ..paired import PairedDataset

COLUMNS = "Columns (--data.kinds.<column> changes what one is read as)"
HEADER = ("column", "read as", "holds")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data set as its user names it; `complete` and `complete_for_model` add what is found out.

    Opening it imports torch; until then a mistake in a command or a table is answered at once.

    settings: as `--data` has them; `root` may be a table in memory; empty: nothing is named
    dataset: one that is open already
    loaded: the table, which is read once
    is_complete: whether the settings say what each column is, as far as it can be found out
    target_kinds: kind of each target that was found out
    rows: column, what it is read as, what it holds
    notes: sentences for the user
    """

    settings: dict[str, Any] = field(default_factory=dict)
    dataset: PairedDataset | None = None
    loaded: LoadedTable | None = None
    is_complete: bool = False
    target_kinds: dict[str, str] = field(default_factory=dict)
    rows: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Any, *, store: bool = False) -> DataSpec:
        """Return what names a data set: its name, a path, settings, a table or data set in memory,
        a `PairedDataset`; None names nothing.

        With `store` a table in memory is written to the cache as Parquet, so that worker processes
        and later commands can read it. What Arrow cannot hold, images, arrays and data sets of
        other libraries, stays what it is.
        """
        if data is None:
            return cls()
        if not isinstance(data, str | os.PathLike | Mapping):
            from ..paired import PairedDataset

            if isinstance(data, PairedDataset):
                return cls(dataset=data)
        settings = settings_of(data)
        if "group" in settings:
            settings["group_column"] = settings.pop("group")
        if not isinstance(settings.get("root"), str | os.PathLike | LoadedTable | None):
            from .in_memory import read_root

            settings = read_root(settings, store=store)
        return cls(settings=settings)

    @property
    def is_in_memory(self) -> bool:
        """Whether no settings can open it again."""
        return self.dataset is not None or isinstance(self.settings.get("root"), LoadedTable)

    @property
    def recorded(self) -> dict[str, Any]:
        """The settings for config.yaml; of what is in memory those of its training samples."""
        if not self.is_in_memory:
            return self.settings
        augment = {x: self.settings[x] for x in ("augment",) if x in self.settings}
        return {"name": IN_MEMORY, **augment}

    @property
    def has_one_target(self) -> bool:
        """Whether the only target is the column in the role `target`, with a label in each row."""
        return len(self.target_kinds) == 1 and "target" in self.settings["columns"]

    @property
    def table(self) -> pa.Table:
        """The table that was read."""
        assert self.loaded is not None
        return self.loaded.table

    @property
    def source(self) -> str:
        """How messages name what was read."""
        assert self.loaded is not None
        return self.loaded.source

    def with_repeated_ids(self) -> DataSpec:
        """Return the same, of a table that was read, whose rows may share an id; joins need ids."""
        if self.loaded is None or self.settings.get("join"):
            return self
        provenance = replace(self.loaded.provenance, repeated_ids={})
        return replace(self, loaded=replace(self.loaded, provenance=provenance))

    def show(self) -> None:
        """Print the table of columns and the notes."""
        if self.rows:
            print_table(COLUMNS, HEADER, self.rows)
        for note in self.notes:
            print(note)

    def open(self, targets: Mapping[str, str] | None = None) -> PairedDataset:
        """Open it, and read these targets; None: the class in column `target`."""
        if self.dataset is not None:
            return self.dataset if targets is None else self.dataset.with_targets(targets)
        from ..base import DATASETS

        settings = resolve_name(self.settings)
        settings.pop("augment", None)  # of training samples: `encoders/augment.py`
        name = settings.pop("name")
        if self.loaded is not None:
            settings["root"] = self.loaded
        if targets is None:
            return DATASETS.create(name, **settings)
        if "targets" in DATASETS[name].parameters:
            return DATASETS.create(name, **{**settings, "targets": targets})
        return DATASETS.create(name, **settings).with_targets(targets)
