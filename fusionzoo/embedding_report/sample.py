"""The rows that a report is about: vectors, labels, groups and content of a random sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.answers import GROUP, AnswerKeys
from fusionzoo.vectors.file import ALIGNED, VectorFile
from fusionzoo.vectors.samples import Samples

MIN_ROWS = 2


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
    samples: Samples
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
    file: VectorFile, rows: NDArray[np.int64], samples: Samples, name: str
) -> EmbeddedSample:
    """Read some rows of every column of vectors, block by block."""
    vectors, usable = {}, {}
    columns = [column for column in file.dims if column != ALIGNED or ALIGNED in file.columns]
    for column in columns:
        vectors[column], usable[column] = file.some(column, rows.tolist())
    ids = [str(x) for x in _cells(file, "id", rows)]
    splits = [str(x or "") for x in _cells(file, "split", rows)]
    targets = [None if x is None else str(x) for x in _cells(file, "target", rows)]
    codes = _codes(samples, ids)
    content = {n.partition("/")[2]: x for n, x in codes.items() if n.startswith("content/")}
    if not any(x.any() for x in usable.values()):
        raise FusionZooError(f"{file.path}: no row has a vector")
    return EmbeddedSample(
        name,
        file,
        rows,
        ids,
        splits,
        targets,
        vectors,
        usable,
        samples,
        content,
        codes.get(GROUP),
    )


def _cells(file: VectorFile, column: str, rows: NDArray[np.int64]) -> list[Any]:
    if column not in file.columns:
        return [None] * len(rows)
    cells = file.strings(column)
    return [cells[row] for row in rows.tolist()]


def _codes(samples: Samples, ids: list[str]) -> dict[str, Tensor]:
    """Return codes of content and group, where the data can be opened and has these ids."""
    if samples.dataset is None or any(samples.row(sample_id) is None for sample_id in ids):
        return {}
    return AnswerKeys(samples.dataset).of(ids)
