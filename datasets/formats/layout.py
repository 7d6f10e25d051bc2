"""Public data sets as they are distributed: Hateful Memes, MM-IMDb, CREMA-D and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError, did_you_mean

from ..amputation import Mechanism
from ..base import DATASETS
from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..provenance import Provenance
from ..splits import SHARES, split_by_hash
from .layout_tables import LAYOUTS, Row
from .loaded import Loaded
from .manifest import manifest

HOLD_OUT = (0.9, 0.1, 0.0)  # shares of a training set that has no validation set


@DATASETS.register("layout", family="format")
def open_layout(
    *,
    layout: str = "",
    root: str = "",
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    missing_mechanism: Mechanism = "mcar",
    targets: Mapping[str, str] | None = None,
    allow_outside: bool = False,
) -> PairedDataset:
    """Open a public data set in the files it is distributed in: `layout="hateful-memes"`.

    Layouts: av-mnist, ave, crema-d, flickr8k (with spoken captions), food-101 (with text),
    hateful-memes, mm-imdb, vggsound. For CMU-MOSI and CMU-MOSEI, `fusionzoo data convert` reads the
    pickles of features. docs/data.md lists the files and columns.

    Settings:
        layout: its name
        root: the folder
        shares: of train, val and test, where the data set has no splits
        on_error: `raise` on a value that cannot be read, treat it as `missing` or `skip` its sample
        max_errors: share of a modality's values that may fail before the run ends, 0 to 1
        modalities: names of those to keep, comma-separated or a list
        missing: share of each modality's values to remove, at least 0 and below 1
        missing_mechanism: `mcar` removes values at random, `mar` depending on the label, `mnar` on
            the value itself (length, brightness, loudness)
        targets: label columns and what they hold, `{"level": "classification"}`; train.py sets it
        allow_outside: whether paths may leave the folder, links resolved
    """
    if layout not in LAYOUTS:
        raise FusionZooError(
            f"--data.layout {layout!r} is unknown.{did_you_mean(layout, LAYOUTS)} Layouts:"
            f" {', '.join(LAYOUTS)}"
        )
    top = Path(root).expanduser()
    if not root or not top.is_dir():
        raise FusionZooError(f"no folder {root!r}: --data.root names it")
    read = LAYOUTS[layout](top)
    held_out = _hold_out(read.rows)
    names = dict.fromkeys(name for row in read.rows for name in row)
    columns = {name: [row.get(name) for row in read.rows] for name in names}
    # A modality of which there is no file, such as frames that nobody extracted, is no column.
    columns = {name: cells for name, cells in columns.items() if any(x is not None for x in cells)}
    table = pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})
    reading = (f"layout {layout}", *(f"left out: {note}" for note in read.notes))
    if held_out:
        reading += (f"val: {held_out:,} of train, by a hash of group or id",)
    loaded = Loaded(
        table=table,
        source=str(top),
        root=top,
        provenance=Provenance(reading=reading),
    )
    return manifest(
        root=loaded,
        kinds={name: kind for name, kind in read.kinds.items() if name in columns},
        shares=shares,
        on_error=on_error,
        max_errors=max_errors,
        modalities=modalities,
        missing=missing,
        missing_mechanism=missing_mechanism,
        targets=targets,
        allow_outside=allow_outside,
    )


def _hold_out(rows: list[Row]) -> int:
    """Move a tenth of `train` to `val`, where a data set has no `val`; return how many samples.

    The first sample of each class stays, so that no class is lost, and with it its group.
    """
    splits = {row.get("split") for row in rows}
    if "train" not in splits or "val" in splits:
        return 0
    train = [row for row in rows if row["split"] == "train"]
    first = {row.get("target"): row for row in reversed(train)}
    stays = {str(row.get("group", row["id"])) for row in first.values()}
    moved = 0
    for row in train:
        key = str(row.get("group", row["id"]))
        if key not in stays and split_by_hash(key, HOLD_OUT) == "val":
            row["split"], moved = "val", moved + 1
    return moved
