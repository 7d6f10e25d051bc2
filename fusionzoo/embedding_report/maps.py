"""2-D maps: t-SNE of the samples' vectors, with thumbnails of the first points."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusionzoo.vectors.file import unit

from .sample import EmbeddedSample

MIN_POINTS = 5
PERPLEXITY = 30.0
THUMBNAIL = 56  # pixels of the longer side
MAX_TEXT = 160  # characters of a text beside the map
DIGITS = 3  # of coordinates, which run from 0 to 1


def project(vectors: Any) -> NDArray[np.float32]:
    """Return t-SNE coordinates of unit vectors, scaled to 0 ... 1: (N, D) -> (N, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    fit = TSNE(perplexity=perplexity, init="pca", random_state=0, n_jobs=1)
    points = np.asarray(fit.fit_transform(vectors), np.float32)
    low, high = points.min(0), points.max(0)
    scaled: NDArray[np.float32] = (points - low) / np.maximum(high - low, 1e-9)
    return scaled


def maps_of(sample: EmbeddedSample, most: int) -> list[dict[str, Any]]:
    """Return a map of each column that is no aligned one, and one of all modalities together.

    A map has `name`, `rows` of the sample, coordinates `xy`, and `modality` of each point or "".
    """
    maps = []
    for column in sample.vectors:
        rows = sample.usable[column].nonzero()[:, 0].numpy()[:most]
        if len(rows) < MIN_POINTS or column.startswith("aligned_"):
            continue
        points = project(unit(sample.vectors[column][rows]).numpy())
        maps.append({"name": column, "rows": rows, "xy": points, "modality": [""] * len(rows)})
    aligned = sample.aligned
    if len(aligned) > 1:
        share = max(MIN_POINTS, most // len(aligned))
        chosen = {n: sample.usable[f"aligned_{n}"].nonzero()[:share, 0] for n in aligned}
        vectors = torch.cat([unit(aligned[name][rows]) for name, rows in chosen.items()])
        names = [name for name, rows in chosen.items() for _ in rows]
        rows = torch.cat(list(chosen.values())).numpy()
        if len(rows) >= MIN_POINTS:
            points = project(vectors.numpy())
            name = "aligned: each modality's vector"
            maps.append({"name": name, "rows": rows, "xy": points, "modality": names})
    return maps


def map_data(sample: EmbeddedSample, most: int, thumbnails: int) -> dict[str, Any]:
    """Return what the page draws: samples with label, split and thumbnail, and their maps."""
    maps = maps_of(sample, most)
    rows = sorted({int(row) for one in maps for row in one["rows"]})
    place = {row: number for number, row in enumerate(rows)}
    points = [_point(sample, row, number < thumbnails) for number, row in enumerate(rows)]
    drawn = [
        {
            "name": one["name"],
            "sample": [place[int(row)] for row in one["rows"]],
            "x": [round(float(x), DIGITS) for x in one["xy"][:, 0]],
            "y": [round(float(y), DIGITS) for y in one["xy"][:, 1]],
            "modality": one["modality"],
        }
        for one in maps
    ]
    return {"samples": points, "maps": drawn}


def _point(sample: EmbeddedSample, row: int, with_picture: bool) -> dict[str, str]:
    """Return a sample's id, label, split and, where asked for, its thumbnail and text."""
    point = {"id": sample.ids[row], "class": sample.targets[row] or "", "split": sample.splits[row]}
    if not with_picture:
        return point
    for picture in sample.samples.pictures(sample.ids[row]):
        if picture.image is not None and "image" not in point:
            picture.image.thumbnail((THUMBNAIL, THUMBNAIL))
            point["image"] = picture.uri
        elif picture.text and "text" not in point:
            point["text"] = picture.text[:MAX_TEXT]
    return point
