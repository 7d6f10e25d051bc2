"""How many values are longer than what an encoder reads of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError

LOOKED_AT = 256  # samples of a modality, at most


def notes_of_cuts(encoders: Iterable[tuple[str, Encoder]], dataset: PairedDataset) -> list[str]:
    """Say which modalities have values that are cut, and the setting that reads more of them."""
    notes = []
    for name, encoder in encoders:
        if not encoder.cut_by or name not in dataset.modalities:
            continue
        values = list(_values(dataset, name))
        processor = encoder.processor(train=False)
        if cut := sum(map(processor.cuts, values)):
            notes.append(
                f"{name}: {cut:,} of {len(values):,} values that were looked at are longer than is"
                f" read, and cut: --encoders.{name}.{encoder.cut_by} says how much is"
            )
    return notes


def _values(dataset: PairedDataset, name: str) -> Iterable[object]:
    """Yield decoded values of a modality, from all parts of the data."""
    samples = dataset.only(name)
    rows = samples.present[:, 0].nonzero()[:, 0]
    if len(rows) > LOOKED_AT:
        rows = rows[torch.linspace(0, len(rows) - 1, LOOKED_AT).long()]
    for row in rows.tolist():
        try:
            sample = samples[row]
        except FusionZooError:
            continue  # is said where it is read
        value = None if sample is None else sample.values[name]
        yield from value if isinstance(value, list) else [] if value is None else [value]
