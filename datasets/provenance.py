"""Where the samples of a data set come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How a data set came to its samples."""

    split_rule: str = ""  # what the splits follow from
    group_rule: str = ""  # what the groups follow from
    unused: tuple[str, ...] = ()  # columns of the source that nothing uses
    deselected: tuple[str, ...] = ()  # modalities that `select` left out
    dropped: int = 0  # samples that have none of those it kept
