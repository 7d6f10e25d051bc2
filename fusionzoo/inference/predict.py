"""Predictions of a finished model as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial as bind
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from fusionzoo.cells import without_formulas
from fusionzoo.config import PredictConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing
from fusionzoo.model import FusionModel
from fusionzoo.predictions import Labels, Prediction

from .batches import encode_batches, open_data, open_model


def predict(
    cfg: PredictConfig, model: FusionModel | None = None, dataset: PairedDataset | None = None
) -> Path | pa.Table:
    """Predict every sample: `id`, `label`, a probability per class, `present_<modality>`.

    Rows stand in the order of the data. Several targets have columns `<target>.label` and so on;
    numbers have no probabilities. Returns the file written (`cfg.out`, .parquet or .csv), or
    without one the table in memory.
    """
    model = open_model(cfg, model)
    if not (model.classes or model.targets):
        raise FusionZooError("this model was trained without a target: it can only embed")
    dataset = open_data(cfg, model, dataset)
    if not cfg.out:
        return pa.concat_tables(_prediction_tables(model, dataset, cfg))
    path = Path(cfg.out)
    writer_of = _writer_for(path)
    if cfg.csv_safe and path.suffix != ".csv":
        raise FusionZooError(f"--csv_safe is for .csv, --out is {path}: leave one of them out")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer: Any = None
    with replacing(path) as partial:
        try:
            for table in _prediction_tables(model, dataset, cfg):
                if cfg.csv_safe:
                    table = _without_formulas(table)
                writer = writer or writer_of(str(partial), table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
    return path


def _without_formulas(table: pa.Table) -> pa.Table:
    """Return a table whose names and text no spreadsheet program runs as formulas."""
    names = [without_formulas(name) for name in table.column_names]
    columns = [
        pa.array([cell and without_formulas(cell) for cell in column.to_pylist()], pa.string())
        if pa.types.is_string(column.type)
        else column
        for column in table.columns
    ]
    return pa.table(columns, names=names)


def _writer_for(path: Path) -> Callable[[str, pa.Schema], Any]:
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetWriter

        return bind(ParquetWriter, write_page_checksum=True)
    if path.suffix == ".csv":
        from pyarrow.csv import CSVWriter

        return CSVWriter
    raise FusionZooError(f"--out {path}: predictions are written as .parquet or .csv")


@torch.no_grad()
def _prediction_tables(
    model: FusionModel, dataset: PairedDataset, cfg: PredictConfig
) -> Iterator[pa.Table]:
    """Yield a table of predictions for each batch."""
    for batch, features in encode_batches(model, dataset, cfg, "predict", by_length=False):
        predictions = model.answer(features)
        columns: dict[str, Any] = {"id": batch.ids}
        for row in (_prediction_row(prediction) for prediction in predictions):
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        present = batch.present.cpu().unbind(1)
        columns |= {
            f"present_{name}": x.tolist() for name, x in zip(model.modalities, present, strict=True)
        }
        yield pa.table(columns)


def _prediction_row(prediction: Any) -> dict[str, Any]:
    """Return the columns of one sample's prediction."""
    by_target = prediction if isinstance(prediction, dict) else {"": prediction}
    row: dict[str, Any] = {}
    for target, value in by_target.items():
        prefix = f"{target}." if target else ""
        if isinstance(value, Prediction):
            row[f"{prefix}label"] = value.label
        elif isinstance(value, Labels):
            row[f"{prefix}label"] = ";".join(value.labels)
        else:
            row[f"{prefix}label"] = float(value)
            continue
        row |= {f"{prefix}p_{label}": p for label, p in value.probabilities.items()}
    return row
