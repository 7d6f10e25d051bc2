"""Paired data: `create_dataset("manifest", root="my.csv")`, `create_dataset("digits")`."""

if __name__ == "datasets":
    raise ImportError(
        "this is fusionzoo's folder `datasets`, met under a bare name because its parent folder"
        " is on sys.path: import `fusionzoo.datasets`, or run from elsewhere to get Hugging Face's"
    )

from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.registry import import_siblings

from . import builtin, sources
from .base import DATASETS, DatasetEntry
from .collate import Collate
from .paired import PairedDataset
from .samplers import PairedBatchSampler, PairedSampler, make_sampler
from .splits import split_by_hash

__all__ = [
    "DATASETS",
    "Collate",
    "DatasetEntry",
    "PairedBatchSampler",
    "PairedDataset",
    "PairedSampler",
    "create_dataset",
    "list_datasets",
    "make_sampler",
    "split_by_hash",
]

for folder in (builtin, sources):  # what registers data sets; a layout is a manifest, too
    import_siblings(folder.__path__, folder.__name__)


def create_dataset(name: Any, **settings: Any) -> PairedDataset:
    """Open a data set by name, or your own data: `create_dataset(df, kinds={"xray": "image"})`.

    `name` is the name of a data set (`fusionzoo data list` shows names and settings), a path, or
    what is in memory, with the settings of `manifest`: a DataFrame, an Arrow table, a list of
    dicts, a dict of columns, a Hugging Face `Dataset` or `DatasetDict`, a PyTorch data set of
    dicts. Cells may be PIL images, arrays, bytes, `(samples, rate)`, text and lists; they are
    decoded on access.
    """
    from .naming import is_path, settings_of, view_of  # imports formats, which import this package

    if isinstance(name, PairedDataset):
        return view_of(name, settings)
    if isinstance(name, str) and not is_path(name):
        return DATASETS.create(name, **settings)
    source = {**settings_of(name), **settings}
    if "name" not in source:
        raise FusionZooError("settings of a data set need its name: {'name': 'digits'}")
    return DATASETS.create(source.pop("name"), **source)


def list_datasets() -> list[str]:
    """Return the names of all data sets."""
    return sorted(DATASETS)
