"""Paired data: `create_dataset("manifest", root="my.csv")`, `create_dataset("digits")`."""

if __name__ == "datasets":
    raise ImportError(
        "this is fusionzoo's folder `datasets`, met under a bare name because its parent folder"
        " is on sys.path: import `fusionzoo.datasets`, or run from elsewhere to get Hugging Face's"
    )

from typing import Any

from fusionzoo.registry import import_siblings

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

import_siblings(__path__, __name__)  # what registers data sets


def create_dataset(name: str, **settings: Any) -> PairedDataset:
    """Open the data set `name`; `fusionzoo data list` shows names and settings."""
    return DATASETS.create(name, **settings)


def list_datasets() -> list[str]:
    """Return the names of all data sets."""
    return sorted(DATASETS)
