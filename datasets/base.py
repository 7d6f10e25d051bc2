"""The registry of data sets, and helpers that all of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.registry import Entry, Registry, keyword_only, settings_class, type_hints

from .amputation import Mechanism
from .failures import MAX_ERRORS, OnError, check_policy
from .media.ranges import Ranges
from .paired import PairedDataset
from .tables.paths import labels_of_join
from .tables.splits import SHARES, makers_of_splits
from .tables.table import word_list

POLICY = ("on_error", "max_errors", "image_range")  # rules by which a data set is read
# What registers data sets; a layout is a manifest, too.
HOMES = ("fusionzoo.datasets.builtin", "fusionzoo.datasets.opening")


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The settings of all data sets; `DATASETS.create` applies them.

    Settings:
        on_error: `raise` on a value that cannot be read, treat it as `missing` or `skip` its sample
        max_errors: share of a modality's values that may fail before the run ends, 0 to 1
        image_range: values that are black and white in images of 16 or 32 bits, `0,4095`, or by
            modality, `{"scan": [0, 4095]}`; training learns them from its split
        modalities: names of those to keep, comma-separated or a list
        random_splits: seed by which splits are drawn at random instead of the data's own, whole
            groups, by `shares`
        shares: of train, val and test in random splits
        split_file: table of `id` and `split`, instead of the data's own splits; samples that it
            does not list are left out
        val_share: share of the training samples that become the validation split, which the data
            lacks; whole groups, chosen by a hash
        missing: share of each modality's values to remove, at least 0 and below 1
        missing_mechanism: `mcar` removes values at random, `mar` depending on the label, `mnar` on
            the value itself (length, brightness, loudness)
    """

    on_error: OnError = "raise"
    max_errors: float = MAX_ERRORS
    image_range: Ranges = None
    modalities: str | Sequence[str] | None = None
    random_splits: int | None = None
    shares: Sequence[float] = SHARES
    split_file: str = ""
    val_share: float | None = None
    missing: float = 0.0
    missing_mechanism: Mechanism = "mcar"

    def __post_init__(self) -> None:
        check_policy(self.on_error, self.max_errors)
        if self.random_splits is not None and self.split_file:
            raise FusionZooError("--data.random_splits and --data.split_file: leave one out")

    def view(self, dataset: PairedDataset) -> PairedDataset:
        """Change splits, keep some modalities of a data set, remove some values."""
        if self.random_splits is not None:
            dataset = dataset.draw_splits(self.random_splits, self.shares)
        if self.split_file:
            from .sources.table_files import read_split_file

            dataset = dataset.with_splits(
                read_split_file(Path(self.split_file).expanduser()), self.split_file
            )
        if self.val_share is not None:
            dataset = dataset.hold_out(self.val_share)
        if self.modalities is not None:
            names = self.modalities
            in_join = labels_of_join() is not None  # rows without them may have another source's
            dataset = dataset.only(word_list(names)) if in_join else dataset.select(names)
        if self.missing_mechanism != "mcar":
            if not self.missing:
                raise FusionZooError("--data.missing_mechanism needs --data.missing RATE")
            return dataset.amputate(self.missing_mechanism, rate=self.missing)
        return dataset.drop(self.missing) if self.missing else dataset


DEFAULTS = SharedSettings()
SHARED = dict(inspect.signature(SharedSettings).parameters)


@dataclass(frozen=True, kw_only=True)
class DatasetEntry(Entry[PairedDataset]):
    """Facts about one data set, or about a format of one's own data.

    A function that opens files takes the `SharedSettings` as `shared`, as `on_error` decides
    whether they must exist; one with many settings of its own takes them whole, as `settings` of a
    dataclass.
    """

    # Downloads it into a folder (None: the cache), and returns where it is.
    fetch: Callable[[Path | None], Path] | None = None

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        declared = {name: p for name, p in super().parameters.items() if name != "shared"}
        return {**declared, **{name: p for name, p in SHARED.items() if name not in declared}}

    @property
    def hints(self) -> dict[str, Any]:
        return {**type_hints(SharedSettings), **super().hints}

    def build(self, *args: Any, **settings: Any) -> PairedDataset:
        """Open the data set, and apply those of `SharedSettings` that it has not as its own."""
        declared = super().parameters
        common = {name: settings.pop(name) for name in SHARED if name in settings.keys() - declared}
        if "shares" in common and common.get("random_splits") is None:
            raise FusionZooError("this data has splits of its own: --data.random_splits SEED")
        if "shares" in settings:  # of splits by hash, too
            common["shares"] = settings["shares"]
        makers = makers_of_splits(common)
        if makers and settings.get("time_column"):
            raise FusionZooError(f"--data.time_column and --data.{makers[0]}: leave one out")
        shared = SharedSettings(**common)
        whole = settings_class(self.cls)
        if "shared" in declared:
            settings["shared"] = shared
        if whole is not None:
            fields = {name: settings.pop(name) for name in keyword_only(whole) if name in settings}
            settings["settings"] = whole(**fields)
        dataset = self.cls(*args, **settings)
        policy = {name: getattr(shared, name) for name in POLICY if name in common}
        return shared.view(dataset.with_policy(**policy))


DATASETS: Registry[PairedDataset, DatasetEntry] = Registry(
    "data set", "fusionzoo data list", DatasetEntry, ("built-in", "format"), packages=HOMES
)


def from_memory(
    values: Mapping[str, Sequence[Any] | Tensor],
    kinds: Mapping[str, str],
    *,
    ids: Sequence[str],
    splits: Sequence[str],
    target: Sequence[str],
    **options: Any,
) -> PairedDataset:
    """Return a data set of values in memory, which every sample has."""
    rows = np.arange(len(ids))
    table = {
        "id": pa.array(ids),
        "split": pa.array(splits),
        "target": pa.array(target),
        **dict.fromkeys(values, pa.array(rows)),
    }
    return PairedDataset(pa.table(table), kinds, memory=values, **options)
