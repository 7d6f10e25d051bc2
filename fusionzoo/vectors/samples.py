"""The samples behind the rows of a file of embeddings: paths, texts, columns of their table."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.audit.pictures import show_sample
from fusionzoo.config import merge
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.arrays import ArrayItem
from fusionzoo.datasets.media import decode
from fusionzoo.datasets.naming import IN_MEMORY
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.inputs import data_settings, in_memory, read_data
from fusionzoo.plugins import load_plugins
from fusionzoo.training.build import open_dataset

from .file import VectorFile

PLAYED = 20  # seconds of a sound that a page can play


class Samples:
    """The data set that was embedded; `problem` says why it cannot be opened."""

    def __init__(self, dataset: PairedDataset | None, problem: str = "") -> None:
        self.dataset, self.problem = dataset, problem
        self._row_of: dict[str, int] | None = None

    def row(self, sample_id: str) -> int | None:
        """Return a sample's row in the data set's table."""
        if self.dataset is None:
            return None
        if self._row_of is None:
            rows = self.dataset.rows.tolist()
            self._row_of = dict(zip(self.dataset.ids, rows, strict=True))
        return self._row_of.get(sample_id)

    def sources(self, sample_id: str) -> dict[str, str]:
        """Return the path or text of each modality that a sample has."""
        row, dataset = self.row(sample_id), self.dataset
        if row is None or dataset is None:
            return {}
        values = {name: dataset.reference(name, row) for name in dataset.modalities}
        return {name: str(x) for name, x in values.items() if isinstance(x, str | Path | ArrayItem)}

    def pictures(self, sample_id: str) -> list[Any]:
        """Return thumbnail, waveform or excerpt of each modality, for a page."""
        row = self.row(sample_id)
        return [] if row is None or self.dataset is None else show_sample(self.dataset, row)

    def player(self, sample_id: str, modality: str) -> str:
        """Return the beginning of a sound as a data URI, or "" where it cannot be read."""
        row, dataset = self.row(sample_id), self.dataset
        if row is None or dataset is None or dataset.modalities.get(modality) != "audio":
            return ""
        try:
            clip = decode("audio", dataset.reference(modality, row))
            return sound_uri(clip.read(0, min(clip.frames, PLAYED * clip.rate)), clip.rate)
        except (FusionZooError, OSError, ValueError, RuntimeError):
            return ""  # its waveform says that it cannot be decoded

    def column(self, name: str, ids: pa.Array) -> pa.Array:
        """Return a column of the data set's table for some ids, null where it lacks the id."""
        if self.dataset is None or name not in self.dataset.table.column_names:
            has = [] if self.dataset is None else self.dataset.table.column_names
            reason = f" ({self.problem})" if self.problem else f": it has {', '.join(has)}"
            raise FusionZooError(
                f"--where: neither the file nor its data has a column {name!r}{reason}"
            )
        places = pc.index_in(ids.cast(pa.string()), self.dataset.table["id"].combine_chunks())
        return self.dataset.table[name].combine_chunks().take(places)


def open_samples(file: VectorFile, data: Any = None, plugins: str | Sequence[str] = ()) -> Samples:
    """Open the data that a file was made of: `data` if given, else what its metadata names."""
    settings: Mapping[str, Any] = {}
    try:
        recorded = file.metadata.get("data")
        recorded = recorded if isinstance(recorded, Mapping) else {}
        if isinstance(data, Mapping) and data and not data.get("name") and recorded.get("name"):
            data = merge(recorded, data)  # `--data.root` alone: the data has moved
        if data:
            data = read_data(data)
            dataset = in_memory(data, {})
            if dataset is not None:
                return Samples(dataset)
            settings = data_settings(data)
        else:
            settings = recorded
            if settings.get("name") in (None, "", IN_MEMORY):
                return Samples(None, "the file does not name its data: --data says where it is")
        load_plugins(plugins)
        return Samples(open_dataset(dict(settings), {}))
    except (FusionZooError, OSError) as error:
        if data:
            raise
        return Samples(None, f"its data cannot be opened: {one_line(error)}")


def sound_uri(samples: Any, rate: int) -> str:
    """Return a mono clip as a data URI that browsers play: OGG, or WAV at rates that it lacks."""
    import soundfile

    for kind, subtype in (("OGG", "VORBIS"), ("WAV", "PCM_16")):
        buffer = io.BytesIO()
        try:
            soundfile.write(buffer, samples.numpy(), rate, format=kind, subtype=subtype)
        except (soundfile.LibsndfileError, RuntimeError):
            continue
        data = base64.b64encode(buffer.getvalue()).decode()
        return f"data:audio/{kind.lower()};base64,{data}"
    return ""
