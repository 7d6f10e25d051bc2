"""Data sets from other ones, and to files: join several, write a manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from .export import write_manifest
from .join import join_arguments
from .join_rows import How
from .table import SampleTable


class Exchange(SampleTable):
    """A `SampleTable` that joins with others and is written as a manifest."""

    @classmethod
    def join(
        cls,
        sources: Mapping[str, Self],
        how: How = "inner",
        on: str | Mapping[str, str] = "id",
    ) -> Self:
        """Pair separate sources by id: `join({"image": photos, "audio": clips}, how="outer")`.

        A source gives the modality it is named after, or its only one under its own name, else all.
        `inner` keeps the ids that all have, `left` those of the first source, `outer` all, with
        modalities missing. Splits and targets must agree; splits of a column come before those made
        by a hash.

        `on` is another column to join on, or one for each source, and then one source may have
        several samples for each sample of the others: `join({"photo": a, "review": b},
        on="product")`. Ids are that source's; samples of one product are a group.
        """
        return cls(**join_arguments(sources, how, on))

    def to_manifest(self, path: str | os.PathLike[str], *, embed: bool = False) -> dict[str, Any]:
        """Write the samples as a manifest; return the settings that open it.

        Its suffix is .parquet, .jsonl, .csv or .tsv. Files are referenced relative to the manifest,
        or in Parquet with `embed` copied into it. Values in memory need Parquet, except for text.
        `create_dataset(**ds.to_manifest("a.csv"))` opens the same samples; of Parquet files the
        path is enough.
        """
        return write_manifest(self, Path(path), embed)
