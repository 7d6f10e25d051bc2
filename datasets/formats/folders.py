"""Class folders: the path gives split and class; files of one stem are one sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from ..amputation import Mechanism
from ..base import DATASETS, apply_shared_settings
from ..failures import MAX_ERRORS, OnError
from ..media import SUFFIXES
from ..paired import PairedDataset
from ..provenance import Provenance
from ..refusals import refuse
from ..splits import SHARES, SPLITS, make_splits

KINDS = ("image", "text", "audio")


@DATASETS.register("folders", family="format")
def folders(
    *,
    root: str = "",
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    missing_mechanism: Mechanism = "mcar",
    allow_outside: bool = False,
) -> PairedDataset:
    """Open files in class folders: `root/[split/]class/id.png|jpg|txt|wav|flac|ogg|mp3`.

    Files that share folder and stem are one sample: `cat/7.jpg`, `cat/7.txt` and `cat/7.wav`.
    Hidden files and folders are ignored.

    Settings:
        root: the top folder
        shares: of train, val and test, if there are no folders of these names; a hash of the id
            assigns the split, and leaves none without a class where it can
        on_error: `raise` on a value that cannot be read, treat it as `missing` or `skip` its sample
        max_errors: share of a modality's values that may fail before the run ends, 0 to 1
        modalities: names of those to keep, comma-separated or a list
        missing: share of each modality's values to remove, at least 0 and below 1
        missing_mechanism: `mcar` removes values at random, `mar` depending on the label, `mnar` on
            the value itself (length, brightness, loudness)
        allow_outside: whether links may lead to files outside of `root`
    """
    top = Path(root).expanduser()
    if not root or not top.is_dir():
        raise FusionZooError(f"no folder {root!r}: --data.root names it")
    has_splits = any((top / split).is_dir() for split in SPLITS)
    rows = _find_samples(top, has_splits)
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    columns = {name: [row.get(name) for row in rows] for name in ("id", "split", "target", *kinds)}
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    rule = "the folders"
    if not has_splits:
        made = make_splits(table["id"], [table["target"]], shares)
        table = table.set_column(1, "split", made.splits)
        rule = f"by a hash of folder and stem{made.exceptions}"
    dataset = PairedDataset(
        table,
        {kind: kind for kind in kinds},
        root=top,
        source=str(top),
        on_error=on_error,
        paths=kinds,
        allow_outside=allow_outside,
        provenance=Provenance(split_rule=rule, split_shares=None if has_splits else tuple(shares)),
        max_errors=max_errors,
    )
    return apply_shared_settings(dataset, modalities, missing, missing_mechanism)


def _find_samples(top: Path, has_splits: bool) -> list[dict[str, str]]:
    """Return id, target, files by kind of modality and, if folders are splits, split of samples."""
    kind_of = {suffix: kind for kind in KINDS for suffix in SUFFIXES[kind]}
    rows: dict[str, dict[str, str]] = {}
    for path in sorted(top.rglob("*")):
        kind, parts = kind_of.get(path.suffix.lower()), path.relative_to(top).parts
        hidden = any(part.startswith(".") for part in parts)
        if kind is None or hidden or not path.is_file():
            continue
        if len(parts) != 2 + has_splits:
            expected = f"expected {'split/' if has_splits else ''}class/file below {top}"
            refuse(f"{path}: {expected}", "file")
            continue
        key = "/".join((*parts[:-1], path.stem))
        row = rows.setdefault(key, {"id": key, "target": parts[-2]})
        if has_splits:
            row["split"] = parts[0]
        if kind in row:
            refuse(f"{path}: sample {key!r} has another {kind}, {row[kind]}", "file")
            continue
        row[kind] = str(path.relative_to(top))
    if not rows:
        raise FusionZooError(f"{top} has no image, text or audio file in class folders")
    return list(rows.values())
