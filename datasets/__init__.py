"""Paired data: `create_dataset("manifest", root="my.csv")`, `create_dataset("digits")`."""

from __future__ import annotations

if __name__ == "datasets":
    raise ImportError(
        "this is fusionzoo's folder `datasets`, met under a bare name because its parent folder"
        " is on sys.path: import `fusionzoo.datasets`, or run from elsewhere to get Hugging Face's"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import DATASETS as DATASETS
    from .base import DatasetEntry as DatasetEntry
    from .collate import Collate as Collate
    from .paired import PairedDataset as PairedDataset
    from .samplers import PairedBatchSampler as PairedBatchSampler
    from .samplers import PairedSampler as PairedSampler
    from .samplers import make_sampler as make_sampler
    from .sources.table_files import READERS as READERS
    from .sources.table_files import TableReader as TableReader
    from .sources.table_settings import TableSettings as TableSettings
    from .tables.provenance import Provenance as Provenance
    from .tables.splits import split_by_hash as split_by_hash

_HOMES = {  # name -> its module, which imports torch and so waits until the name is used
    "DATASETS": "base",
    "DatasetEntry": "base",
    "Collate": "collate",
    "PairedDataset": "paired",
    "PairedBatchSampler": "samplers",
    "PairedSampler": "samplers",
    "make_sampler": "samplers",
    "READERS": "sources.table_files",
    "TableReader": "sources.table_files",
    "TableSettings": "sources.table_settings",
    "Provenance": "tables.provenance",
    "split_by_hash": "tables.splits",
}
__all__ = [
    "DATASETS",
    "READERS",
    "Collate",
    "DatasetEntry",
    "PairedBatchSampler",
    "PairedDataset",
    "PairedSampler",
    "Provenance",
    "TableReader",
    "TableSettings",
    "create_dataset",
    "list_datasets",
    "make_sampler",
    "split_by_hash",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def create_dataset(name: Any, **settings: Any) -> PairedDataset:
    """Open a data set by name, or your own data: `create_dataset(df, kinds={"xray": "image"})`.

    `name` is the name of a data set (`fusionzoo data list` shows names and settings), a path, or
    what is in memory, with the settings of `manifest`: a DataFrame, an Arrow table, a list of
    dicts, a dict of columns, a Hugging Face `Dataset` or `DatasetDict`, a PyTorch data set of
    dicts. Cells may be PIL images, arrays, bytes, `(samples, rate)`, text and lists; they are
    decoded on access.
    """
    from .base import DATASETS
    from .opening.naming import resolve_name, settings_of, view_of
    from .paired import PairedDataset

    if isinstance(name, PairedDataset):
        return view_of(name, settings)
    source = resolve_name({**settings_of(name), **settings})
    return DATASETS.create(source.pop("name"), **source)


def list_datasets(pattern: str | None = None, /) -> list[str]:
    """Return the names of all data sets, or of those that a shell pattern matches, sorted.

    A family's name (`built-in`, `format`) stands for the data sets of that family.

    >>> list_datasets("dig*")
    ['digits']
    """
    from .base import DATASETS

    return DATASETS.names(pattern)
