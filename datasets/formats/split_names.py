"""Other people's names of splits."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

USUAL_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def usual_splits(splits: Any) -> tuple[Any, dict[str, str]]:
    """Return a column of splits with the usual names, and the other names that it had.

    Case does not count. `dev` stays as it is beside another name for val, as it then is something
    else.

    >>> usual_splits(pa.array(["Train", "dev", "extra"]))[1]
    {'Train': 'train', 'dev': 'val'}
    """
    whole = splits.combine_chunks() if isinstance(splits, pa.ChunkedArray) else splits
    encoded = whole.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    present = {USUAL_NAMES.get(name.lower()) for name in names if name.lower() != "dev"}
    renamed = {}
    for name in names:
        usual = USUAL_NAMES.get(name.lower())
        is_other = name.lower() == "dev" and usual in present
        if usual is not None and name != usual and not is_other:
            renamed[name] = usual
    if not renamed:
        return splits, {}
    words = pa.array([renamed.get(name, name) for name in names])
    return words.take(encoded.indices), renamed
