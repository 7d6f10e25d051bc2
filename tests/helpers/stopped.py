"""Conversions to shards that stop in the middle, what they leave, and those of earlier versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionzoo.datasets.shards import write


class Stop(Exception):
    """Ends a conversion in the middle."""


def stop_at(value: int, convert: Callable[[], Any]) -> None:
    """Convert until the `value`-th value is to be stored."""
    calls, real, values_of = iter(range(10**6)), write.stored_value, write._Conversion._values

    def failing(kind: str, stored: Any, prepare: bool) -> Any:
        if next(calls) == value:
            raise Stop
        return real(kind, stored, prepare)

    def values(conversion: Any, position: int) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:  # planning reads some values, too
            patch.setattr(write, "stored_value", failing)
            return values_of(conversion, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write._Conversion, "_values", values)
        with pytest.raises(Stop):
            convert()


def hashes(folder: Path) -> dict[str, str]:
    return {x.name: hashlib.md5(x.read_bytes()).hexdigest() for x in sorted(folder.iterdir())}


def without_checksums(folder: Path) -> Path:
    """Make shards what the first version of the index was: without checksums of what is read."""
    index = json.loads((folder / "shards.json").read_text())
    for name in ("sha256", "samples_sha256"):
        del index[name]
    for file in index["files"]:
        del file["checksums"]
        file["ranges"] = file["ranges"] if index["format"] == "webdataset" else []
    (folder / "shards.json").write_text(json.dumps({**index, "version": 1}))
    return folder
