"""embed.py: what it costs does not grow with the table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from fusionzoo import create_dataset, create_model
from fusionzoo.datasets import PairedDataset
from fusionzoo.scripts.embed import main as embed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    data = create_dataset("interactions", samples=60)
    encoders = {**data.default_encoders}
    model = create_model("sum", encoders, classes=data.classes, kinds=data.modalities, dim=4)
    return model.save(tmp_path_factory.mktemp("model"))


def test_whole_columns_are_read_once_however_many_batches_there_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    column = PairedDataset.column

    def counted(self: PairedDataset, name: str) -> list[object]:
        reads[name] += 1
        return column(self, name)

    monkeypatch.setattr(PairedDataset, "column", counted)
    counts = []
    for size in ("60", "5"):  # one batch, then twelve
        reads.clear()
        data = ["--data.name", "interactions", "--data.samples", "60", "--split", "all"]
        out = ["--model", str(model), "--out", str(tmp_path / "e.parquet"), "--batch_size", size]
        assert embed([*data, *out]) == 0
        counts.append(dict(reads))
    assert counts[0] == counts[1]
    assert max(counts[0].values()) == 1
