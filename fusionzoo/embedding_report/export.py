"""Exports for other viewers: TensorBoard's projector and Embedding Atlas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.vectors.file import unit

from .maps import MIN_POINTS, project
from .sample import EmbeddedSample

KINDS = ("tensorboard", "atlas")
NEIGHBOURS = 15
SPRITE = 32  # pixels of a picture in TensorBoard
MAX_SPRITE = 8192  # pixels of a side of the picture of all of them, which browsers can load


def export(sample: EmbeddedSample, kinds: list[str], folder: Path) -> list[Path]:
    """Write the exports into a folder; return their paths."""
    writers = {"tensorboard": export_tensorboard, "atlas": export_atlas}
    for kind in kinds:
        if kind not in KINDS:
            raise FusionZooError(f"--export {kind}: it is one of {', '.join(KINDS)}")
    if kinds:
        folder.mkdir(parents=True, exist_ok=True)
    return [writers[kind](sample, folder) for kind in kinds]


def export_tensorboard(sample: EmbeddedSample, folder: Path) -> Path:
    """Write every column of vectors for the projector: `tensorboard --logdir FOLDER`."""
    from torch.utils.tensorboard import SummaryWriter

    out = folder / "tensorboard"
    with SummaryWriter(str(out)) as writer:
        for column, vectors in sample.vectors.items():
            rows = sample.usable[column].nonzero()[:, 0]
            if not len(rows):
                continue
            lines = [
                [_cell(sample.ids[row]), _cell(sample.targets[row]), _cell(sample.splits[row])]
                for row in rows.tolist()
            ]
            writer.add_embedding(
                vectors[rows],
                metadata=lines,
                metadata_header=["id", "class", "split"],
                label_img=_sprites(sample, rows.tolist()),
                tag=column,
            )
    return out


def export_atlas(sample: EmbeddedSample, folder: Path) -> Path:
    """Write a Parquet file with projection and neighbours, and the command that opens it."""
    column = "fused" if "fused" in sample.vectors else next(iter(sample.vectors))
    rows = sample.usable[column].nonzero()[:, 0]
    if len(rows) < MIN_POINTS:
        raise FusionZooError(f"{sample.file.path}: fewer than {MIN_POINTS} rows have {column!r}")
    vectors = unit(sample.vectors[column][rows])
    points = project(vectors.numpy())
    columns: dict[str, Any] = {
        "id": [sample.ids[row] for row in rows.tolist()],
        "class": [sample.targets[row] for row in rows.tolist()],
        "split": [sample.splits[row] for row in rows.tolist()],
        "projection_x": points[:, 0],
        "projection_y": points[:, 1],
        "neighbors": _neighbours(vectors),
    }
    texts = [_text(sample, row) for row in rows.tolist()]
    if any(texts):
        columns["text"] = texts
    path = folder / "atlas.parquet"
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return path


def atlas_command(path: Path) -> str:
    """Return the command that opens the export in Embedding Atlas."""
    text = " --text text" if "text" in pq.read_schema(path).names else ""
    axes = "--x projection_x --y projection_y --neighbors neighbors"
    return f"embedding-atlas {path}{text} {axes}"


def _neighbours(vectors: torch.Tensor) -> list[dict[str, Any]]:
    """Return the nearest rows of each, as Embedding Atlas reads them: row numbers, distances."""
    count = min(NEIGHBOURS + 1, len(vectors))
    neighbours: list[dict[str, Any]] = []
    for rows in torch.arange(len(vectors)).split(1024):
        top = (vectors[rows] @ vectors.T).topk(count, dim=1)
        for ids, cosines in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            distances = [max(0.0, 1 - cosine) for cosine in cosines]
            neighbours.append({"ids": ids, "distances": distances})
    return neighbours


def _sprites(sample: EmbeddedSample, rows: list[int]) -> torch.Tensor | None:
    """Return small pictures of the samples, (N, 3, 32, 32) in [0, 1]; None without pictures."""
    if sample.samples.dataset is None or len(rows) > (MAX_SPRITE // SPRITE) ** 2:
        return None
    sprites = torch.ones(len(rows), 3, SPRITE, SPRITE)
    has_any = False
    for number, row in enumerate(rows):
        for picture in sample.samples.pictures(sample.ids[row]):
            if picture.image is not None:
                small = picture.image.convert("RGB").resize((SPRITE, SPRITE))
                sprites[number] = torch.from_numpy(np.array(small)).permute(2, 0, 1) / 255
                has_any = True
                break
    return sprites if has_any else None


def _text(sample: EmbeddedSample, row: int) -> str:
    sources = sample.samples.sources(sample.ids[row])
    dataset = sample.samples.dataset
    kinds = {} if dataset is None else dataset.modalities
    return next((x for name, x in sources.items() if kinds.get(name) == "text"), "")


def _cell(value: str | None) -> str:
    """Return a cell of a TSV file."""
    return " ".join(json.dumps(value or "", ensure_ascii=False)[1:-1].split())
