"""Others' predictions of the test samples, compared with the fusions sample by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, explained, list_names
from fusionzoo.model.trained_on import SEEN

from ..bench import Bench

FOLD = "fold"  # column of the split that predictions are of, from 0
TOLERANCE = 1e-3  # of the sum of a sample's probabilities
MAX_NAMED = 3  # ids in a message


def with_predictions(
    bench: Bench, ids: Sequence[str], names: Sequence[str], id_column: str = "id"
) -> Bench:
    """Return the bench with the predictions that `--external` names, a Parquet file of ids and
    `p_<class>`, as `fusionzoo predict` writes it.

    `ids` are those of all samples, `id_column` what the data calls them; `names` are those of
    candidates, which are taken. Every tested sample needs a row, and none that `seen_in_training`
    marks; other rows are left out. Where a sample is tested in several splits, `fold` says of which
    split, from 0, a row is.
    """
    path = bench.cfg.external
    if not path:
        return bench
    if bench.scheme is not None:
        raise FusionZooError(f"--external {path}: predictions are read of one target of classes")
    name = Path(path).stem
    if name in names:
        raise FusionZooError(f"--external {path}: {name!r} is measured here: rename the file")
    of_row = _read(path, bench.classes, by_fold=bench.from_splits, id_column=id_column)
    logits = []
    for number, fold in enumerate(bench.folds):
        keys = [(ids[row], number if bench.from_splits else 0) for row in fold.test.tolist()]
        missing = [key for key in keys if key not in of_row]
        if missing:
            shown = ", ".join(repr(key) for key, _ in missing[:MAX_NAMED])
            raise FusionZooError(
                f"--external {path} has no prediction of {len(missing):,} of {len(keys):,} samples"
                f" that fold {number} tests: {shown}"
            )
        seen = sum(of_row[key].seen for key in keys)
        if seen:
            raise FusionZooError(
                f"--external {path}: training saw {seen:,} of {len(keys):,} samples that fold"
                f" {number} tests (column {SEEN!r}): predict them by a model that was not trained"
                " on them"
            )
        logits.append(torch.stack([of_row[key].logits for key in keys]))
    return replace(bench, predictions={name: tuple(logits)})


class _Row(NamedTuple):
    logits: Tensor  # (K,), logarithms of the probabilities
    seen: bool  # whether training read the sample


def _read(
    path: str, classes: Sequence[str], *, by_fold: bool, id_column: str = "id"
) -> dict[tuple[str, int], _Row]:
    """Return the row of each id and fold.

    Ids are the column of the data's name for them, or `id`, or the first, as `predict` has it.
    """
    import pyarrow as pa

    from fusionzoo.datasets.tables.parquet import read_parquet

    with explained(f"--external {path} cannot be read as Parquet"):
        table = read_parquet(Path(path))
    names, columns = table.column_names, [f"p_{label}" for label in classes]
    key = next((x for x in (id_column, "id", *names[:1]) if x in names and x not in columns), "id")
    for needed in (key, *columns, *((FOLD,) if by_fold else ())):
        if names.count(needed) != 1:
            reason = " as samples may be tested in several splits" if needed == FOLD else ""
            raise FusionZooError(
                f"--external {path} has {'two columns' if needed in names else 'no column'}"
                f" {needed!r}{reason}; it has {list_names(names)}"
            )

    def values(name: str, kind: pa.DataType, words: str) -> pa.ChunkedArray:
        with explained(f"--external {path}: column {name!r} must hold {words}"):
            return table[name].cast(kind)

    numbers = [values(name, pa.float64(), "numbers").to_numpy() for name in columns]
    shares = np.stack(numbers, axis=1)
    bad = ~(np.isfinite(shares).all(1) & (shares >= 0).all(1))
    bad |= ~(np.abs(shares.sum(1) - 1) <= TOLERANCE)
    ids = values(key, pa.string(), "text or numbers").to_pylist()
    if bad.any():
        raise FusionZooError(
            f"--external {path}: the probabilities of id {ids[int(bad.argmax())]!r} are not from 0"
            " to 1 with sum 1"
        )
    folds = values(FOLD, pa.int64(), "whole numbers").to_pylist() if by_fold else [0] * len(ids)
    marked = [SEEN] if SEEN in names else []
    seen = {row for name in marked for row, x in enumerate(table[name].to_pylist()) if x}
    keys = list(zip(ids, folds, strict=True))
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise FusionZooError(f"--external {path}: id {repeated[0][0]!r} is there twice")
    logits = torch.from_numpy(shares).clamp(min=1e-12).log().float()
    return {
        key: _Row(x, row in seen) for row, (key, x) in enumerate(zip(keys, logits, strict=True))
    }
