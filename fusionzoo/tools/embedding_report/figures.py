"""The rows, figures and 2-D maps of an embedding report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.geometry import (
    alignment,
    effective_rank,
    linear_cka,
    modality_gap,
    uniformity,
)
from fusionzoo.evaluation.retrieval import Relevance, RelevanceLabels, any_pair, retrieval_intervals
from fusionzoo.evaluation.statistics import Interval, crossed

from ..search.samples import SearchedSamples
from ..search.vectors import ALIGNED, VectorFile, unit

MIN_ROWS = 2
FOLDS = 5
NEIGHBOURS = 10
MIN_PER_CLASS = 5  # samples; rarer classes are left out of probes
MAX_CLASSES = 200  # more values than that are numbers or names rather than classes
MAX_CKA = 3000  # samples, whose products are (N, N)
NOTHING = Interval(math.nan, math.nan, math.nan)
MIN_POINTS = 5
PERPLEXITY = 30.0
PREVIEWS = 1500  # samples whose image or text the page shows
THUMBNAIL = 56  # pixels of the longer side
MAX_TEXT = 160  # characters of a text beside the map
DIGITS = 3  # of coordinates, which run from 0 to 1


@dataclass(frozen=True)
class EmbeddedSample:
    """Some rows of a file of embeddings. N rows, D width."""

    name: str  # of the file, in tables
    file: VectorFile
    rows: NDArray[np.int64]  # (N,)
    ids: list[str]
    splits: list[str]
    targets: list[str | None]
    vectors: dict[str, Tensor]  # column -> (N, D)
    usable: dict[str, Tensor]  # column -> (N,) bool
    samples: SearchedSamples
    content: dict[str, Tensor] = field(default_factory=dict)  # modality -> codes (N,)
    groups: Tensor | None = None  # codes (N,)

    @property
    def aligned(self) -> dict[str, Tensor]:
        """The vectors of each modality in the common space, if there is one."""
        prefix = f"{ALIGNED}_"
        return {n.removeprefix(prefix): x for n, x in self.vectors.items() if n.startswith(prefix)}

    def group_names(self) -> list[str]:
        """Return each row's group, or its id where there are no groups."""
        return self.ids if self.groups is None else [str(x) for x in self.groups.tolist()]


def draw_rows(file: VectorFile, most: int, split: str = "all") -> NDArray[np.int64]:
    """Draw at most `most` rows of a split, in the order of the file."""
    rows = np.arange(file.rows)
    if split != "all":
        splits = np.array(file.strings("split") if "split" in file.columns else [""] * file.rows)
        rows = np.flatnonzero(splits == split)
        if len(rows) < MIN_ROWS:
            counts = ", ".join(sorted({str(x) for x in splits})) or "none"
            raise FusionZooError(
                f"{file.path}: split {split!r} has {len(rows)} rows, a report needs {MIN_ROWS};"
                f" its splits: {counts}"
            )
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False))


def read_sample(
    file: VectorFile, rows: NDArray[np.int64], samples: SearchedSamples, name: str
) -> EmbeddedSample:
    """Read some rows of every column of vectors, block by block."""
    vectors, usable = {}, {}
    columns = [column for column in file.dims if column != ALIGNED or ALIGNED in file.columns]
    for column in columns:
        vectors[column], usable[column] = file.some(column, rows.tolist())
    ids = [str(x) for x in _cells(file, "id", rows)]
    splits = [str(x or "") for x in _cells(file, "split", rows)]
    targets = [None if x is None else str(x) for x in _cells(file, "target", rows)]
    relevance = _relevance(samples, ids)
    if not any(x.any() for x in usable.values()):
        raise FusionZooError(f"{file.path}: no row has a vector")
    cells = (ids, splits, targets)
    content, groups = dict(relevance.content), relevance.groups
    return EmbeddedSample(name, file, rows, *cells, vectors, usable, samples, content, groups)


def _cells(file: VectorFile, column: str, rows: NDArray[np.int64]) -> list[Any]:
    if column not in file.columns:
        return [None] * len(rows)
    cells = file.strings(column)
    return [cells[row] for row in rows.tolist()]


def _relevance(samples: SearchedSamples, ids: list[str]) -> Relevance:
    """Return the relevance labels of samples, where the data can be opened and has these ids."""
    if samples.dataset is None or any(samples.row(sample_id) is None for sample_id in ids):
        return Relevance()
    return RelevanceLabels(samples.dataset).of(ids)


def column_figures(sample: EmbeddedSample, column: str) -> dict[str, Any]:
    """Return the figures of one column of vectors, of the rows that have it."""
    rows = sample.usable[column].nonzero()[:, 0]
    vectors = sample.vectors[column][rows]
    figures: dict[str, Any] = {
        "file": sample.name,
        "vectors": column,
        "width": vectors.shape[1],
        "samples": len(rows),
        "effective_rank": effective_rank(vectors) if len(rows) > 1 else math.nan,
        "uniformity": uniformity(vectors) if len(rows) > 1 else math.nan,
    }
    labelled = probe_rows([sample.targets[row] for row in rows.tolist()])
    names = ("linear_probe", "knn", "majority")
    figures |= dict.fromkeys(names, NOTHING) | {"silhouette": math.nan, "labelled": 0}
    if labelled:
        targets = [str(sample.targets[row]) for row in rows[labelled].tolist()]
        names_of_groups = sample.group_names()
        groups = [names_of_groups[row] for row in rows[labelled].tolist()]
        figures |= probes(unit(vectors[labelled]).numpy(), np.array(targets), groups)
        figures["labelled"] = len(labelled)
    return figures


def probe_rows(targets: Sequence[str | None]) -> list[int]:
    """Return the rows whose class is frequent enough; none if the targets are no classes."""
    counts = Counter(target for target in targets if target is not None)
    frequent = {target for target, count in counts.items() if count >= MIN_PER_CLASS}
    if not 1 < len(frequent) <= MAX_CLASSES:
        return []
    return [row for row, target in enumerate(targets) if target in frequent]


def probes(vectors: Any, targets: Any, groups: Sequence[str]) -> dict[str, Any]:
    """Return the accuracy of a linear probe and of neighbours over grouped folds: (N, D), (N,).

    Intervals count that samples come in groups and that folds share training data.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import silhouette_score
    from sklearn.model_selection import StratifiedGroupKFold
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from fusionzoo.evaluation.statistics import Array

    nothing = {"linear_probe": NOTHING, "knn": NOTHING, "majority": NOTHING}
    distinct, codes = np.unique(targets, return_inverse=True)
    folds = min(FOLDS, len(set(groups)))
    if folds < 2:
        return nothing
    right: dict[str, Array] = {name: np.zeros(len(targets)) for name in nothing}
    split = StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    for train, test in split.split(vectors, codes, groups):
        if not len(test) or len(np.unique(codes[train])) < 2:
            return nothing
        linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
        near = KNeighborsClassifier(min(NEIGHBOURS, len(train)), metric="cosine")
        for name, model in (("linear_probe", linear), ("knn", near)):
            model.fit(vectors[train], codes[train])
            right[name][test] = model.predict(vectors[test]) == codes[test]
        right["majority"][test] = codes[test] == np.bincount(codes[train]).argmax()
    figures: dict[str, Any] = {
        name: crossed(scores[None], 1 / folds, groups=groups)[0] for name, scores in right.items()
    }
    silhouette = float(silhouette_score(vectors, codes, metric="cosine"))
    return figures | {"silhouette": silhouette, "classes": len(distinct)}


def pair_figures(sample: EmbeddedSample) -> list[dict[str, Any]]:
    """Return alignment and gap of each pair of modalities in the common space."""
    lines = []
    for first, second in combinations(sample.aligned, 2):
        both = sample.usable[f"aligned_{first}"] & sample.usable[f"aligned_{second}"]
        if both.any():
            a, b = sample.aligned[first][both], sample.aligned[second][both]
            shuffled = b.roll(1, 0) if len(b) > 1 else b
            line = {"file": sample.name, "pair": f"{first} and {second}", "samples": len(a)}
            line |= {"alignment": alignment(a, b), "of_others": alignment(a, shuffled)}
            lines.append(line | {"gap": modality_gap(a, b)})
    return lines


def cka_table(samples: Sequence[EmbeddedSample]) -> tuple[list[str], list[list[float]]]:
    """Return linear CKA of every two columns of vectors, of the same file or of two.

    Rows of the samples are the same ids.
    """
    columns: list[tuple[str, Tensor, Tensor]] = []
    for sample in samples:
        prefix = f"{sample.name}: " if len(samples) > 1 else ""
        columns += [(prefix + n, x, sample.usable[n]) for n, x in sample.vectors.items()]
    matrix = [[1.0] * len(columns) for _ in columns]
    for (i, (_, x, has_x)), (j, (_, y, has_y)) in combinations(enumerate(columns), 2):
        rows = (has_x & has_y).nonzero()[:MAX_CKA, 0]
        matrix[i][j] = matrix[j][i] = linear_cka(x[rows], y[rows])
    return [name for name, _, _ in columns], matrix


def retrieval(sample: EmbeddedSample) -> dict[str, dict[str, Interval]]:
    """Return the figures of each direction in the common space."""
    aligned = sample.aligned
    if len(aligned) < 2:
        return {}
    present = torch.stack([sample.usable[f"aligned_{name}"] for name in aligned], dim=1)
    if not any_pair(present):
        return {}
    return retrieval_intervals(aligned, present, content=sample.content, groups=sample.groups)


def project(vectors: Any) -> NDArray[np.float32]:
    """Return t-SNE coordinates of unit vectors, scaled to 0 ... 1: (N, D) -> (N, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    fit = TSNE(perplexity=perplexity, init="pca", random_state=0, n_jobs=1)
    points = np.asarray(fit.fit_transform(vectors), np.float32)
    low, high = points.min(0), points.max(0)
    return np.asarray((points - low) / np.maximum(high - low, 1e-9), np.float32)


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


def map_data(sample: EmbeddedSample, most: int) -> dict[str, Any]:
    """Return what the page draws: samples with label, split and thumbnail, and their maps."""
    maps = maps_of(sample, most)
    rows = sorted({int(row) for drawing in maps for row in drawing["rows"]})
    place = {row: number for number, row in enumerate(rows)}
    points = [_point(sample, row, number < PREVIEWS) for number, row in enumerate(rows)]
    drawn = [
        {
            "name": drawing["name"],
            "sample": [place[int(row)] for row in drawing["rows"]],
            "x": [round(float(x), DIGITS) for x in drawing["xy"][:, 0]],
            "y": [round(float(y), DIGITS) for y in drawing["xy"][:, 1]],
            "modality": drawing["modality"],
        }
        for drawing in maps
    ]
    return {"samples": points, "maps": drawn}


def _point(sample: EmbeddedSample, row: int, with_preview: bool) -> dict[str, str]:
    """Return a sample's id, label, split and, where asked for, its thumbnail and text."""
    point = {"id": sample.ids[row], "class": sample.targets[row] or "", "split": sample.splits[row]}
    if not with_preview:
        return point
    for preview in sample.samples.previews(sample.ids[row]):
        if preview.image is not None and "image" not in point:
            preview.image.thumbnail((THUMBNAIL, THUMBNAIL))
            point["image"] = preview.uri
        elif preview.text and "text" not in point:
            point["text"] = preview.text[:MAX_TEXT]
    return point
