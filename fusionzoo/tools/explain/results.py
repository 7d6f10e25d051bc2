"""The explanations of a data set: figures, a summary, files, and the page."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing, write_json, write_text
from fusionzoo.ground.cells import without_formulas
from fusionzoo.html.template import template
from fusionzoo.structures import Labels, Prediction
from fusionzoo.targets import join_words

from .parts import PartEffect
from .views import bar, view

CARDS = 20  # samples on the page where none has parts


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a model answers one sample as it does. All values are in units of the score."""

    id: str
    answer: Any  # Prediction, Labels or a number
    label: str  # the class or label whose log-odds the score is; empty: it is a number
    unit: str  # what the score is: log-odds of 'cat', units of age
    score: float  # of the whole sample
    empty: float  # of a sample without any modality
    modalities: dict[str, float]  # Shapley values: they sum to `score` - `empty`
    errors: dict[str, float]  # their standard errors, 0 where they are exact
    without: dict[str, Any]  # the answer without each modality that the sample has
    parts: dict[str, list[PartEffect]] = field(default_factory=dict)

    @property
    def decisive(self) -> str:
        """The modality with the largest Shapley value, by its size; empty if all are 0."""
        top = max(self.modalities, key=lambda name: abs(self.modalities[name]))
        return top if self.modalities[top] else ""

    @property
    def changed_without(self) -> list[str]:
        """The modalities without which the answer is another class, level or set of labels."""
        here = answer_text(self.answer)
        words = isinstance(self.answer, Prediction | Labels)
        return [m for m, x in self.without.items() if words and answer_text(x) != here]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = asdict(self)
        values["answer"] = _plain(self.answer)
        values["without"] = {name: _plain(x) for name, x in self.without.items()}
        values["parts"] = {name: [x._asdict() for x in xs] for name, xs in self.parts.items()}
        return values


@dataclass(frozen=True, kw_only=True)
class ModalitySummary:
    """What holds over all samples, by modality."""

    samples: int
    mean_size: dict[str, float]  # mean of |Shapley value|
    decides: dict[str, float]  # share of samples where the modality has the largest |Shapley value|
    changes: dict[str, float]  # share of samples with it whose answer is another one without it


class Explanations(Sequence[Explanation]):
    """The explanations of a data set's samples, in its order."""

    def __init__(
        self,
        rows: Sequence[Explanation],
        dataset: PairedDataset,
        methods: Mapping[str, str],
        notes: Sequence[str] = (),
    ) -> None:
        self.rows, self.dataset = list(rows), dataset
        self.methods, self.notes = dict(methods), list(notes)  # modality -> how parts are hidden

    def __getitem__(self, key: Any) -> Any:
        return self.rows[key]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Explanations of {len(self):,} samples of {self.dataset.source}"

    @property
    def summary(self) -> ModalitySummary:
        """Means and shares over the samples."""
        names, count = list(self.rows[0].modalities), len(self.rows)
        decisive = Counter(row.decisive for row in self.rows)
        with_it = {name: [row for row in self.rows if name in row.without] for name in names}
        return ModalitySummary(
            samples=count,
            mean_size={n: sum(abs(x.modalities[n]) for x in self.rows) / count for n in names},
            decides={name: decisive[name] / count for name in names},
            changes={
                name: sum(name in row.changed_without for row in rows) / max(1, len(rows))
                for name, rows in with_it.items()
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "source": self.dataset.source,
            "summary": asdict(self.summary),
            "methods": self.methods,
            "notes": self.notes,
            "samples": [row.to_dict() for row in self.rows],
        }

    def save(self, path: str | Path) -> Path:
        """Write `.json` with everything, or `.csv` with a row per sample and without parts."""
        path = Path(path)
        if path.suffix == ".json":
            write_json(path, self.to_dict())
        elif path.suffix == ".csv":
            with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(self._lines())
        else:
            raise FusionZooError(f"--out {path}: explanations are written as .json or .csv")
        return path

    def _lines(self) -> Iterator[list[Any]]:
        names = list(self.rows[0].modalities)
        columns = [f"{kind}_{n}" for kind in ("shapley", "error", "without") for n in names]
        yield ["id", "answer", "unit", "score", "empty", *columns]
        for row in self.rows:
            figures = [*row.modalities.values(), *row.errors.values()]
            answers = [answer_text(row.without[n]) if n in row.without else "" for n in names]
            texts = (without_formulas(x) for x in (row.id, answer_text(row.answer), row.unit))
            yield [*texts, row.score, row.empty, *figures, *map(without_formulas, answers)]

    def to_html(self, path: str | Path) -> Path:
        """Write a page: the summary, and the samples whose parts are explained."""
        path = Path(path)
        position = {sample_id: row for row, sample_id in enumerate(self.dataset.ids)}
        shown = [row for row in self.rows if row.parts] or self.rows[:CARDS]
        cards = [card(row, self.dataset, position[row.id]) for row in shown]
        header, rows = summary_rows(self)
        sizes = list(self.summary.mean_size.values())
        page = template("page.html", "fusionzoo.tools.explain").render(
            title=f"Why: {len(self):,} samples of {self.dataset.source}",
            verdict=verdict(self),
            header=header,
            rows=rows,
            bars=[100 * size / (max(sizes) or 1) for size in sizes],
            methods=self.methods,
            notes=self.notes,
            cards=cards,
        )
        write_text(path, page)
        return path


def answer_text(answer: Any) -> str:
    """Return a prediction in a few words."""
    if isinstance(answer, Prediction):
        return answer.label
    if isinstance(answer, Labels):
        return join_words(answer.labels)
    return f"{answer:.4g}"


def _plain(answer: Any) -> Any:
    return answer._asdict() if isinstance(answer, Prediction | Labels) else answer


def verdict(explanations: Explanations) -> str:
    """Return the summary in a sentence or two."""
    summary = explanations.summary
    first, *_ = sorted(summary.decides, key=lambda name: -summary.decides[name])
    text = (
        f"{first} decides most often: in {summary.decides[first]:.0%} of {summary.samples:,}"
        " samples it has the largest Shapley value."
    )
    if any(summary.changes.values()):
        most = max(summary.changes, key=lambda name: summary.changes[name])
        text += f" Without {most}, {summary.changes[most]:.0%} of the answers are other ones."
    return text


def card(row: Explanation, dataset: PairedDataset, position: int) -> dict[str, Any]:
    """Return what the template shows of a sample, whose values are read again."""
    sample, kinds = dataset[position], dataset.modalities
    top = max((abs(x) for x in row.modalities.values()), default=0) or 1
    bars = []
    for name, x in row.modalities.items():
        without = answer_text(row.without[name]) if name in row.without else ""
        facts = {"without": without, "changes": name in row.changed_without}
        bars.append(bar(name, x, top) | facts | {"error": row.errors[name]})
    values = {} if sample is None else sample.values
    views = [
        view(name, kinds[name], values[name], row.parts.get(name, []))
        for name in row.modalities
        if values.get(name) is not None
    ]
    return {"row": row, "answer": describe(row.answer), "bars": bars, "views": views}


def describe(answer: Any) -> str:
    """Return an answer with its probability."""
    if isinstance(answer, Prediction):
        return f"{answer.label} ({answer.probability:.0%})"
    return answer_text(answer) or "no label"


def summary_rows(explanations: Explanations) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the summary's table."""
    summary = explanations.summary
    header = ["modality", "mean |Shapley|", "decides", "changes the answer"]
    shares = (summary.decides, summary.changes)
    rows = [
        [name, f"{size:.3f}", *(f"{share[name]:.1%}" for share in shares)]
        for name, size in summary.mean_size.items()
    ]
    return header, rows
