"""The registry of data sets, and the settings that all of them share."""

from __future__ import annotations

from collections.abc import Sequence

from fusionzoo.registry import Registry

from .paired import PairedDataset

DATASETS: Registry[PairedDataset] = Registry("data set", "fusionzoo data list")


def tidy(
    dataset: PairedDataset, modalities: str | Sequence[str] | None, missing: float, seed: int = 0
) -> PairedDataset:
    """Apply the settings that every data set has: some modalities only, some values removed."""
    if modalities is not None:
        dataset = dataset.select(modalities)
    return dataset.drop(missing, seed) if missing else dataset
