"""Public data sets as they are distributed: Hateful Memes, MM-IMDb, CREMA-D and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError, check_known

from ..base import DATASETS, DEFAULTS, SharedSettings
from ..paired import PairedDataset
from ..sources.table_settings import TableSettings
from ..tables.provenance import MAX_LISTED, LoadedTable, Provenance
from ..tables.splits import SHARES, split_by_hash
from .clip_layouts import ave, crema_d, kinetics_sounds, label_csv, meld, ur_funny, vggsound
from .layout_files import LayoutTable, Row
from .manifest import manifest
from .picture_layouts import av_mnist, flickr8k, food101, hateful_memes, mm_imdb, n24news

HOLD_OUT = (0.9, 0.1, 0.0)  # shares of a training set that has no validation set


@dataclass(frozen=True)
class DataLayout:
    """How a data set is read, and how many samples it has."""

    read: Callable[[Path], LayoutTable]
    noun: str  # what a sample is, for the data summary
    count: int = 0  # in docs/data.md with their sources; 0: no source was found


LAYOUTS = {
    "av-mnist": DataLayout(av_mnist, "samples", 70_000),
    "ave": DataLayout(ave, "clips", 4_143),
    "ch-sims": DataLayout(label_csv, "clips", 2_281),
    "cmu-mosei": DataLayout(label_csv, "clips", 22_856),
    "crema-d": DataLayout(crema_d, "clips", 7_442),
    "flickr8k": DataLayout(flickr8k, "captions", 40_000),
    "food-101": DataLayout(food101, "recipes"),
    "hateful-memes": DataLayout(hateful_memes, "memes", 10_000),
    "kinetics-sounds": DataLayout(kinetics_sounds, "clips", 17_396),
    "meld": DataLayout(meld, "utterances", 13_708),
    "mm-imdb": DataLayout(mm_imdb, "films", 25_959),
    "n24news": DataLayout(n24news, "articles"),
    "ur-funny": DataLayout(ur_funny, "clips"),
    "vggsound": DataLayout(vggsound, "clips"),
}


def what_is_here(layout: DataLayout, read: LayoutTable) -> str:
    """Say of how many samples the files are here, and which ones are missing.

    >>> table = LayoutTable(rows=[{"id": "a"}], missing=["b", "c"])
    >>> what_is_here(DataLayout(meld, "clips", 4), table)
    'you have 1 of 4 clips; missing b, c, and 1 left out or in no list'
    """
    missing = set(read.missing)
    here = sum(row["id"] not in missing for row in read.rows)
    listed = here + len(missing)
    total = layout.count or listed
    text = f"you have {here:,} of {total:,} {layout.noun}"
    names = [*read.missing[:MAX_LISTED]]
    if len(read.missing) > MAX_LISTED:
        names.append(f"and {len(read.missing) - MAX_LISTED:,} more")
    if listed < total:
        names.append(f"{'and ' if names else ''}{total - listed:,} left out or in no list")
    text += f"; missing {', '.join(names)}" if names else ""
    return text + (f"; {listed:,} are listed" if listed > total else "")


@DATASETS.register("layout", family="format")
def open_layout(
    *,
    layout: str = "",
    root: str = "",
    shares: Sequence[float] = SHARES,
    shared: SharedSettings = DEFAULTS,
    targets: Mapping[str, str] | None = None,
    allow_outside: bool = False,
) -> PairedDataset:
    """Open a public data set in the files it is distributed in: `layout="hateful-memes"`.

    Layouts: av-mnist, ave, ch-sims, cmu-mosei, crema-d, flickr8k (with spoken captions), food-101
    (with text), hateful-memes, kinetics-sounds, meld, mm-imdb, n24news, ur-funny, vggsound. Of
    CMU-MOSI and CMU-MOSEI `fusionzoo data convert` reads the pickles of features. docs/data.md
    lists the files and columns, and in what the literature's variants differ.

    Settings:
        layout: its name
        root: the folder
        shares: of train, val and test, where the data set has no splits
        targets: label columns and what they hold, `{"level": "classification"}`; train.py sets it
        allow_outside: whether paths may leave the folder, links resolved
    """
    check_known(layout, LAYOUTS, f"--data.layout {layout!r} is unknown")
    top = Path(root).expanduser()
    if not root or not top.is_dir():
        raise FusionZooError(f"no folder {root!r}: --data.root names it")
    read = LAYOUTS[layout].read(top)
    held_out = _hold_out(read.rows)
    names = dict.fromkeys(name for row in read.rows for name in row)
    columns = {name: [row.get(name) for row in read.rows] for name in names}
    # A modality of which there is no file, such as frames that nobody extracted, is no column.
    columns = {name: cells for name, cells in columns.items() if any(x is not None for x in cells)}
    table = pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})
    reading = (f"layout {layout}", *(f"left out: {note}" for note in read.notes))
    if held_out:
        reading += (f"val: {held_out:,} of train, by a hash of group or id",)
    reading += (what_is_here(LAYOUTS[layout], read),)
    loaded = LoadedTable(
        table=table, source=str(top), root=top, provenance=Provenance(reading=reading)
    )
    settings = TableSettings(
        root=loaded,
        kinds={name: kind for name, kind in read.kinds.items() if name in columns},
        shares=shares,
        targets=targets,
        allow_outside=allow_outside,
    )
    return manifest(settings, shared=shared)


def _hold_out(rows: list[Row]) -> int:
    """Move a tenth of `train` to a missing `val`, but no class's first sample; count them."""
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
