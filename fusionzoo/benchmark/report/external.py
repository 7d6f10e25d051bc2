"""Others' predictions of the test samples, compared with the fusions sample by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError

from ..bench import Bench

SUFFIX = ".parquet"
FOLD = "fold"  # column of the split that predictions are of, from 0
TOLERANCE = 1e-3  # of the sum of a sample's probabilities
MAX_NAMED = 3  # ids in a message


def with_predictions(bench: Bench, ids: Sequence[str], names: Sequence[str]) -> Bench:
    """Return the bench with the predictions that `--external` names, Parquet files of `id` and
    `p_<class>`, as `fusionzoo predict` writes them.

    `ids` are those of all samples, `names` those of candidates, which are taken. Every tested
    sample needs a row; other rows are left out. Where a sample is tested in several splits,
    `fold` says of which split, from 0, a row is.
    """
    path = bench.cfg.external
    if not path.endswith(SUFFIX):
        return bench
    if bench.scheme is not None:
        raise FusionZooError(f"--external {path}: predictions are read of one target of classes")
    name = Path(path).stem
    if name in names:
        raise FusionZooError(f"--external {path}: {name!r} is measured here: rename the file")
    of_row = _read(path, bench.classes, by_fold=bench.from_splits)
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
        logits.append(torch.stack([of_row[key] for key in keys]))
    return replace(bench, predictions={name: tuple(logits)})


def _read(path: str, classes: Sequence[str], *, by_fold: bool) -> dict[tuple[str, int], Tensor]:
    """Return the logarithms of the probabilities (K,) of each id and fold."""
    import pyarrow as pa

    from fusionzoo.datasets.tables.parquet import read_parquet

    table = read_parquet(Path(path))
    columns = [f"p_{label}" for label in classes]
    for needed in ("id", *columns, *((FOLD,) if by_fold else ())):
        if needed not in table.column_names:
            reason = " as samples may be tested in several splits" if needed == FOLD else ""
            raise FusionZooError(
                f"--external {path} has no column {needed!r}{reason}; it has"
                f" {', '.join(table.column_names)}"
            )
    shares = np.stack([table[name].to_numpy().astype(np.float64) for name in columns], axis=1)
    bad = ~(np.isfinite(shares).all(1) & (shares >= 0).all(1))
    bad |= ~(np.abs(shares.sum(1) - 1) <= TOLERANCE)
    ids = table["id"].cast(pa.string()).to_pylist()
    if bad.any():
        raise FusionZooError(
            f"--external {path}: the probabilities of id {ids[int(bad.argmax())]!r} are not from 0"
            " to 1 with sum 1"
        )
    folds = table[FOLD].to_pylist() if by_fold else [0] * len(ids)
    keys = list(zip(ids, folds, strict=True))
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise FusionZooError(f"--external {path}: id {repeated[0][0]!r} is there twice")
    return dict(zip(keys, torch.from_numpy(shares).clamp(min=1e-12).log().float(), strict=True))
