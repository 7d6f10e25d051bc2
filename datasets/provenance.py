"""Where the samples of a data set come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How a data set got its samples, splits and groups; shown in the data summary."""

    split_rule: str = ""  # how samples are assigned to splits
    group_rule: str = ""  # how samples are assigned to groups
    notes: tuple[tuple[str, str], ...] = ()  # (modality, where its values come from)
    unused: tuple[str, ...] = ()  # columns of the source that nothing uses
    deselected: tuple[str, ...] = ()  # modalities that `select` removed
    dropped: int = 0  # samples without any of the modalities that `select` kept
