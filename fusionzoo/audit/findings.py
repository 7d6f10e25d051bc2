"""Findings of an audit, tables about the data, and the report that holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .scan import Scan

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
TOLERATED = 0.05  # share of a modality's values with a fault that training survives


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of fault in one modality or column, with all samples that have it."""

    check: str
    severity: Severity
    message: str
    advice: str
    modality: str = ""
    # Rows of the table that belong together: single samples, or samples with the same content.
    groups: tuple[tuple[int, ...], ...] = ()
    details: Mapping[int, str] = field(default_factory=dict)  # row -> more about it
    files: tuple[str, ...] = ()  # where the fault is of files rather than samples

    @property
    def rows(self) -> list[int]:
        """All rows, in order."""
        return sorted({row for group in self.groups for row in group})


@dataclass(frozen=True)
class Facts:
    """A table that describes the data, whatever is wrong with it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of an audit."""

    scan: Scan
    findings: Sequence[Finding]
    facts: Sequence[Facts]
    seconds: Mapping[str, float]  # by part of the audit

    @property
    def fit(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def place(self, row: int) -> dict[str, Any]:
        """Return row number, id and split of a sample."""
        table = self.scan.dataset.table
        return {
            "row": self.scan.row_number(row),
            "id": table["id"][row].as_py(),
            "split": table["split"][row].as_py(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with every row of every finding."""
        dataset = self.scan.dataset
        return {
            "source": dataset.source,
            "samples": len(dataset),
            "splits": {str(name): count for name, count in dataset.splits.items()},
            "modalities": dataset.modalities,
            "fit": self.fit,
            "findings": [self._finding_dict(finding) for finding in self.findings],
            "facts": [
                {"title": x.title, "header": list(x.header), "rows": [list(row) for row in x.rows]}
                for x in self.facts
            ],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def _finding_dict(self, finding: Finding) -> dict[str, Any]:
        groups = [
            [{**self.place(row), "detail": finding.details.get(row, "")} for row in group]
            for group in finding.groups
        ]
        return {
            "check": finding.check,
            "severity": finding.severity,
            "modality": finding.modality,
            "message": finding.message,
            "advice": finding.advice,
            "samples": len(finding.rows),
            "groups": groups,
            "files": list(finding.files),
        }


class Check(Protocol):
    """A function that yields a finding for each kind of fault in each modality."""

    __name__: str

    def __call__(self, scan: Scan) -> Iterable[Finding]: ...


Describe = Callable[[Scan], Iterable[Facts]]


def by_share(count: int, total: int) -> Severity:
    """Return `error` if more than 5 % of the values have a fault, else `warning`."""
    return "error" if count > TOLERATED * total else "warning"


def singles(rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return rows as groups of one sample each."""
    return tuple((int(row),) for row in rows)


def counted(count: int, noun: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "sample"), counted(1234, "sample")
    ('1 sample', '1,234 samples')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
