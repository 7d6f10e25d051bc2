"""Where the samples of a data set come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .row_numbers import RowNumbers


@dataclass(frozen=True)
class Amputation:
    """Values that were removed on purpose."""

    mechanism: str  # mcar, mar, mnar
    rate: float  # share of each modality's values
    seed: int
    modalities: tuple[str, ...]
    depends_on: str = ""  # mar: `label` or a modality


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How a data set got its samples, splits and groups; shown in the data summary."""

    reading: tuple[str, ...] = ()  # how the file was read, where that is not what it usually is
    missing: str = ""  # words in cells that were read as missing, with their counts
    joined: str = ""  # which of the joined sources have how many rows
    numbered: bool = False  # whether ids are the rows' numbers, for want of a column
    empty_rows: int = 0  # rows without any modality that were left out
    split_rule: str = ""  # how samples are assigned to splits
    split_shares: tuple[float, ...] | None = None  # of splits made by hash; None: the data's own
    group_rule: str = ""  # how samples are assigned to groups
    notes: tuple[tuple[str, str], ...] = ()  # (modality, where its values come from)
    unused: tuple[str, ...] = ()  # columns of the source that nothing uses
    inferred: tuple[str, ...] = ()  # roles and kinds of columns that the source declares
    deselected: tuple[str, ...] = ()  # modalities that `select` removed
    dropped: int = 0  # samples without any of the modalities that `select` kept
    amputations: tuple[Amputation, ...] = ()  # values removed on purpose, in that order
    row_numbers: RowNumbers | None = RowNumbers()  # in messages; None: samples have no row

    def keep_rows(self, mask: NDArray[np.bool_]) -> Provenance:
        """Return the provenance of the rows of a table where `mask` is true."""
        return replace(self, row_numbers=self.row_numbers and self.row_numbers.keep(mask))
