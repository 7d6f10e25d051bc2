"""How a benchmark identifies a data set in memory."""

from __future__ import annotations

import json
from typing import Any

from fusionzoo.datasets import PairedDataset
from fusionzoo.features.encode import key_of
from fusionzoo.features.identity import data_identity


def dataset_settings(dataset: PairedDataset) -> dict[str, Any]:
    """Return settings that identify a data set in memory; they cannot open it again."""
    encoders = json.loads(json.dumps(dataset.default_encoders, default=str))
    key = key_of([data_identity(dataset), encoders, dataset.on_error])
    return {"name": dataset.source, "in_memory": key}
