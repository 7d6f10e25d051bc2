"""The registry of data sets, and helpers that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.registry import Entry, Registry

from .amputation import Mechanism
from .paired import PairedDataset
from .paths import labels_of_join
from .table import word_list


@dataclass(frozen=True, kw_only=True)
class DatasetEntry(Entry[PairedDataset]):
    """Facts about one data set, or about a format of one's own data."""

    # Downloads it into a folder (None: the cache), and returns where it is.
    fetch: Callable[[Path | None], Path] | None = None


class DatasetRegistry(Registry[PairedDataset, DatasetEntry]):
    """The registry of data sets, which all have the setting `reuse_memory`."""

    def create(
        self, name: str, *args: Any, reuse_memory: bool | str = True, **settings: Any
    ) -> PairedDataset:
        switch = {"on": True, "off": False}.get(str(reuse_memory), reuse_memory)
        if not isinstance(switch, bool):
            raise FusionZooError(f"--data.reuse_memory: {reuse_memory=} is neither on nor off")
        dataset = super().create(name, *args, **settings)
        dataset.reuse_memory = switch
        return dataset


DATASETS = DatasetRegistry("data set", "fusionzoo data list", DatasetEntry, ("built-in", "format"))


def apply_shared_settings(
    dataset: PairedDataset,
    modalities: str | Sequence[str] | None,
    missing: float,
    mechanism: Mechanism = "mcar",
) -> PairedDataset:
    """Apply the settings that all data sets have: keep some modalities, remove some values."""
    if modalities is not None:
        in_join = labels_of_join() is not None  # rows without them may have another source's
        dataset = dataset.only(word_list(modalities)) if in_join else dataset.select(modalities)
    if mechanism != "mcar":
        if not missing:
            raise FusionZooError(f"--data.missing_mechanism {mechanism} needs --data.missing RATE")
        return dataset.amputate(mechanism, rate=missing)
    return dataset.drop(missing) if missing else dataset


def from_memory(
    values: Mapping[str, Sequence[Any] | Tensor],
    kinds: Mapping[str, str],
    *,
    ids: Sequence[str],
    splits: Sequence[str],
    target: Sequence[str],
    present: Mapping[str, NDArray[np.bool_]] | None = None,
    **options: Any,
) -> PairedDataset:
    """Return a data set of values in memory, one per sample and modality.

    `kinds` maps the modalities to their kinds; `present` has a mask (N,) for each modality that
    some samples lack; `options` are those of `PairedDataset`.
    """
    rows = np.arange(len(ids))
    absent = {name: ~mask for name, mask in (present or {}).items()}
    table = {
        "id": pa.array(ids),
        "split": pa.array(splits),
        "target": pa.array(target),
        **{name: pa.array(rows, mask=absent.get(name)) for name in values},
    }
    return PairedDataset(pa.table(table), kinds, memory=values, **options)
