"""Samples of the data set behind a file of embeddings, by row of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fusionzoo.config import merge
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.media.arrays import ArrayItem
from fusionzoo.datasets.opening.naming import IN_MEMORY
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.html.samples import show_sample

from .vectors import VectorFile


class SearchedSamples:
    """The data set that was embedded; `problem` says why it cannot be opened."""

    def __init__(self, dataset: PairedDataset | None, problem: str = "") -> None:
        self.dataset, self.problem = dataset, problem

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Id -> row in the data set's table."""
        if self.dataset is None:
            return {}
        return dict(zip(self.dataset.ids, self.dataset.rows.tolist(), strict=True))

    def sources(self, sample_id: str) -> dict[str, str]:
        """Return the path or text of each modality that a sample has."""
        row, dataset = self.row_of.get(sample_id), self.dataset
        if row is None or dataset is None:
            return {}
        values = {name: dataset.reference(name, row) for name in dataset.modalities}
        return {name: str(x) for name, x in values.items() if isinstance(x, str | Path | ArrayItem)}

    def previews(self, sample_id: str) -> list[Any]:
        """Return thumbnail, waveform with player, or excerpt of each modality."""
        row = self.row_of.get(sample_id)
        if row is None or self.dataset is None:
            return []
        return show_sample(self.dataset, row, plays=True)


def open_samples(
    file: VectorFile, data: Any = None, plugins: str | Sequence[str] = ()
) -> SearchedSamples:
    """Open the data that a file was made of: `data` if given, else what its metadata names."""
    try:
        recorded = file.metadata.get("data")
        recorded = recorded if isinstance(recorded, Mapping) else {}
        if isinstance(data, Mapping) and data and not data.get("name") and recorded.get("name"):
            data = merge(recorded, data)  # `--data.root` alone: the data has moved
        if not data and recorded.get("name") in (None, "", IN_MEMORY):
            problem = "the file does not name its data: --data says where it is"
            return SearchedSamples(None, problem)
        load_plugins(plugins)
        return SearchedSamples(DataSpec.of(data or recorded).open({}))
    except (FusionZooError, OSError) as error:
        if data:
            raise
        return SearchedSamples(None, f"its data cannot be opened: {one_line(error)}")
