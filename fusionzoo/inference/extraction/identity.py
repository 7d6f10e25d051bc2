"""What an extraction depends on: digests of model and data, and what a file says of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch

from fusionzoo.config import EmbedConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.features.encode import fingerprint, key_of, weights_hash
from fusionzoo.model import FusionModel
from fusionzoo.sources import code_digest
from fusionzoo.version import __version__

from .vectors import PROBABILITIES, WEIGHTS

FORMAT = 1  # of the parts; raised when the same settings give other data
ROWS_AT_ONCE = 65_536
LABELS = ("id", "split", "target")  # text columns that are copied from the data set


def model_digest(model: FusionModel) -> str:
    """Return the hash of a model's weights, settings and, of a plugin's components, code."""
    parts = [*model.encoders.values(), model.fusion]
    code = [code_digest(type(part)) for part in parts]
    return key_of([weights_hash(model), json.dumps(model.spec, sort_keys=True, default=str), code])


def data_fingerprint(dataset: PairedDataset) -> str:
    """Return the hash of ids, splits, labels and values; of files, their size and time.

    Read some rows at a time, so memory does not grow with the table.
    """
    digest = hashlib.sha256()
    for start in range(0, len(dataset), ROWS_AT_ONCE):
        rows = dataset.subset(range(start, min(start + ROWS_AT_ONCE, len(dataset))))
        for name in LABELS:
            _add_column(digest, rows.chosen(name))
        for name, kind in dataset.modalities.items():
            digest.update(f"\0{name} {kind}\0".encode())
            column = rows.chosen(name)
            is_reference = name in dataset.paths and pa.types.is_string(column.type)
            if name in dataset.memory or is_reference:
                digest.update(fingerprint(rows, name).encode())
            else:
                _add_column(digest, column)
    return digest.hexdigest()[:24]


def _add_column(digest: Any, column: Any) -> None:
    """Hash an Arrow column's cells, whatever the chunks they are stored in."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too large for one array
        array = pa.concat_arrays(array.chunks)
    batch = pa.record_batch([array], names=["cells"])
    digest.update(str(array.type).encode())
    digest.update(batch.serialize())


def parts_key(about: Mapping[str, Any], cfg: EmbedConfig, device: torch.device) -> dict[str, str]:
    """Return what parts must share to make one file: model, data and settings, hashed."""
    chosen = ("row_group", "batch_size", "dtype", "normalise", "matryoshka", "probabilities")
    settings = {
        name: getattr(cfg, name) for name in (*chosen, "weights", "amp", "compile", "split")
    }
    settings |= {"format": FORMAT, "device": device.type}
    settings |= {name: about[name] for name in ("fusionzoo", "torch")}
    return {
        "model": str(about["model_digest"]),
        "data": str(about["data_fingerprint"]),
        "settings": key_of(settings),
    }


def describe(
    cfg: EmbedConfig,
    settings: Mapping[str, Any],
    model: FusionModel,
    dataset: PairedDataset,
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """Return what a file says of itself, under the key `fusionzoo` of its metadata."""
    unit = {name for name in widths if cfg.normalise or name.startswith("aligned_")}
    vectors = {
        name: {"width": width, "normalised": name in unit}
        for name, width in widths.items()
        if name not in (PROBABILITIES, WEIGHTS)
    }
    about: dict[str, Any] = {
        "model": cfg.model,
        "data": dict(settings),
        "split": cfg.split,
        "rows": len(dataset),
        "fusionzoo": __version__,
        "torch": str(torch.__version__),
        "model_digest": model_digest(model),
        "data_fingerprint": data_fingerprint(dataset),
        "modalities": model.modalities,
        "encoders": {name: encoder.spec for name, encoder in model.named_encoders()},
        "fusion": model.spec["fusion"],
        "vectors": vectors,
        "dtype": cfg.dtype,
        "amp": cfg.amp,
    }
    if cfg.probabilities:
        about["classes"] = model.classes
    return json.loads(json.dumps(about, default=str))
