"""Where the samples of a data set come from."""

from __future__ import annotations

from dataclasses import dataclass


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

    split_rule: str = ""  # how samples are assigned to splits
    group_rule: str = ""  # how samples are assigned to groups
    unused: tuple[str, ...] = ()  # columns of the source that nothing uses
    inferred: tuple[str, ...] = ()  # roles and kinds of columns that the source declares
    deselected: tuple[str, ...] = ()  # modalities that `select` removed
    dropped: int = 0  # samples without any of the modalities that `select` kept
    amputations: tuple[Amputation, ...] = ()  # values removed on purpose, in that order
