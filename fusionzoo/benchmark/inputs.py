"""How a benchmark identifies a data set in memory."""

from __future__ import annotations

import json
from typing import Any

from fusionzoo.datasets import PairedDataset
from fusionzoo.features.encode import fingerprint, key_of


def dataset_settings(dataset: PairedDataset) -> dict[str, Any]:
    """Return settings that identify a data set in memory; they cannot open it again."""
    columns = [dataset.ids, dataset.split_names, dataset.labels, dataset.groups]
    values = {name: fingerprint(dataset, name) for name in dataset.modalities}
    encoders = json.loads(json.dumps(dataset.default_encoders, default=str))
    key = key_of([columns, dataset.modalities, values, encoders, dataset.on_error])
    return {"name": dataset.source, "in_memory": key}
