"""What the page of a run shows: the run, its data, drawings, mistakes, the worst samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from torch import Tensor

from fusionzoo.benchmark.report.plots import COLOURS, INK, finish, panel_grid, rendered
from fusionzoo.config import read_yaml
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.naming import IN_MEMORY, data_title
from fusionzoo.datasets.summary import class_counts, data_facts
from fusionzoo.datasets.tables.splits import SPLITS
from fusionzoo.evaluation.measure import weighted_by
from fusionzoo.html.samples import show_sample
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.trained_on import count_seen
from fusionzoo.structures import Labels, Prediction
from fusionzoo.targets import Number
from fusionzoo.training.gain import GAIN
from fusionzoo.training.report import FUSED, FUSION, TRAINED, Run

from .mistakes import (
    SplitAnswers,
    Table,
    answer_lines,
    confusion,
    error_table,
    given_table,
    numbers_of,
    per_label,
    short,
    worst,
)

SAMPLES = 20  # worst ones on the page
MAX_VALUES = 12  # modalities of a sample that are shown
MAX_SOUND = 6_000_000  # characters of all players together; further clips are drawn only
MAX_TEXT = 500  # characters of a fact about the data
MAX_TARGETS = 8  # whose mistakes are shown
CHANGED = 0.02  # by which the leading metric may differ from the run's own test
MAX_POINTS = 300  # of a curve
MAX_DOTS = 500  # samples in a panel of numbers


def about_run(run: Run, model: FusionModel) -> dict[str, Any]:
    """Return title, verdict, curves and results, which the run's folder holds."""
    settings = read_yaml(run.folder / "config.yaml")
    is_named = settings["data"]["name"] != IN_MEMORY
    data = data_title(settings["data"]) if is_named else "data in memory"
    header, rows = run.results()
    epochs, losses, metric, scores = run.curves()
    titles = dict(zip(run.metrics["table"]["metrics"], header[1:], strict=True))
    best = run.metrics["best_epoch"]
    drawn = learning_curves(epochs, losses, titles.get(metric, metric), scores, best)
    encoders = [f"{name} {short(spec['name'])}" for name, spec in settings["encoders"].items()]
    return {
        "title": f"Run {run.folder.resolve().name} on {data}",
        "verdict": verdict(run, model),
        "built": f"fusion {settings['fusion']['name']}; encoders {', '.join(encoders)}",
        "curves": drawn if epochs else "",
        "best": best,
        "chosen": "the last" if run.metrics.get("select") == "last" else "the best by validation",
        "results": (header, rows),
    }


def verdict(run: Run, model: FusionModel) -> str:
    """Return in a sentence what the fusion reaches on the test split, and what it gains."""
    header, rows = run.results()
    if not header[1:]:
        return "This run has no figures of its test split."
    known = None if model.trained_on is None else model.trained_on.results
    fused = next(row for row in reversed(rows) if row[0].startswith((FUSED, TRAINED)))
    text = f"{fused[0].partition(': ')[2]}: {header[1]} {fused[1]}"
    if known is not None:
        interval = known.rows[0].metrics.get(run.metrics["table"]["metrics"][0], [])[1:]
        text += f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        text += f" on {known.samples['test']:,} test samples"
    if GAIN in run.metrics:
        text += f". Gain in {run.metrics[GAIN]['words']}"
    return f"{text}."


def columns_of(run: Run) -> dict[str, list[str]]:
    """Return the columns of the user's table by modality and role, as the run remembers them."""
    columns = read_yaml(run.folder / "config.yaml")["data"].get("columns") or {}
    return {
        role: [str(name) for name in (names if isinstance(names, list) else [names])]
        for role, names in columns.items()
    }


def about_data(
    columns: Mapping[str, Sequence[str]], model: FusionModel, dataset: PairedDataset | None
) -> dict[str, Any]:
    """Return the facts of the data and what each modality has; without data what is stored."""
    facts = []
    if dataset is not None:
        # `have` is in the table of modalities; hints are for training; labels are not read here.
        hidden = {"have", "hint", "unused", *(["target"] if model.targets is None else [])}
        facts = [(title, text) for title, text in data_facts(dataset) if title not in hidden]
        labels = Counter(str(x) for x in dataset.labels if x is not None) if model.classes else {}
        facts += [("classes", class_counts({x: labels[x] for x in model.classes}))] * bool(labels)
    elif model.trained_on is not None and model.trained_on.results is not None:
        counts = model.trained_on.results.samples
        facts = [("splits", ", ".join(f"{name} {count:,}" for name, count in counts.items()))]
    roles = {x: ", ".join(y) for x, y in columns.items() if x not in model.modalities}
    facts += [(f"{role} is", f"column {names}") for role, names in roles.items()]
    if dataset is not None:
        used = {name for names in columns.values() for name in names}
        unused = [name for name in dataset.provenance.unused if name not in used]
        facts += [("unused", ", ".join(unused))] if unused else []
    return {
        "facts": [(title, short(text, MAX_TEXT)) for title, text in facts],
        "modalities": modality_table(columns, model, dataset),
    }


def modality_table(
    columns: Mapping[str, Sequence[str]], model: FusionModel, dataset: PairedDataset | None
) -> Table:
    """Return kind and columns of each modality, and how many samples of each split have it."""
    counts = {} if dataset is None else dataset.splits
    splits = [name for name in SPLITS if name in counts]
    splits += [name for name in counts if name not in splits]
    header, rows = ["modality", "kind", *(["columns"] if columns else []), *splits], []
    for name, kind in model.modalities.items():
        cells = [name, kind]
        cells += [short(", ".join(columns.get(name, [name])))] if columns else []
        has = Counter[str]()
        if dataset is not None and name in dataset.modalities:
            present = dataset.present[:, [*dataset.modalities].index(name)].tolist()
            pairs = zip(dataset.split_names, present, strict=True)
            has.update(split for split, is_there in pairs if is_there)
        rows.append([*cells, *(f"{has[split]:,} of {counts[split]:,}" for split in splits)])
    return header, rows


def notes(run: Run, measured: SplitAnswers | None, problem: str, *, is_test: bool) -> Iterator[str]:
    """Yield what a reader should know of the samples on the page; `is_test`: of the run's test."""
    if problem:
        yield f"The data cannot be opened, so the page shows none of its samples: {problem}"
    elif measured is None:
        yield "The model was trained without a target: there are no mistakes to show."
    else:
        model = measured.model
        seen = count_seen(model.trained_on, measured.dataset, list(model.modalities))
        if None not in seen.values() and any(seen.values()):
            yield (
                f"Of these samples the model was trained on {seen['train']:,} and validated on"
                f" {seen['val']:,}: their figures are not those of new data."
            )
        if (column := measured.dataset.weight_column) is not None:
            yield f"Metrics are {weighted_by(column)}, losses of single samples and counts are not."
        tested, name = run.metrics["test"], measured.tasks.leading
        now = measured.figures.fused.get(name, tested.get(name))
        if is_test and name in tested and abs(now - tested[name]) > CHANGED * abs(tested[name]):
            yield (
                f"On the data as they are now {name} is {now:.3f}, in the run's own test it was"
                f" {tested[name]:.3f}: they may have changed since."
            )


def about_answers(columns: Mapping[str, Sequence[str]], measured: SplitAnswers) -> dict[str, Any]:
    """Return mistakes by target, the tables by modalities, and the worst samples."""
    numbers: dict[str, tuple[Tensor, Tensor]] = {}
    sections = []
    for name, (target, labels) in [*measured.labels().items()][:MAX_TARGETS]:
        predicted: list[Any] = [answers[name] for answers in measured.predictions]
        name = columns.get(name, [name])[0] if name == "target" else name
        if isinstance(target, Number) and (pair := numbers_of(target, labels, predicted)):
            numbers[name] = pair
        elif isinstance(predicted[0], Labels):
            sections.append({"name": name, "table": per_label(target, labels, predicted)})
        elif isinstance(predicted[0], Prediction):
            sections.append({"name": name, **confusion(target, labels, predicted)})
    return {
        "mistakes": sections,
        "errors": error_table(numbers) if numbers else None,
        "residuals": residuals(numbers) if numbers else "",
        "given": given_table(measured),
        "cards": list(cards(measured)),
        "measured": len(measured.answers.ids),
    }


def cards(measured: SplitAnswers) -> Iterator[dict[str, Any]]:
    """Yield the worst samples, with pictures, texts and players."""
    dataset, sound = measured.dataset, 0
    row_of = dict(zip(dataset.ids, dataset.rows.tolist(), strict=True))
    names = [*dataset.modalities][:MAX_VALUES]
    for place, loss in worst(measured, SAMPLES):
        sample_id = measured.answers.ids[place]
        previews = show_sample(dataset, row_of[sample_id], names, plays=sound < MAX_SOUND)
        sound += sum(len(preview.player) for preview in previews)
        yield {
            "id": short(sample_id),
            "loss": loss,
            "lines": answer_lines(measured, place),
            "previews": previews,
            "more": len(dataset.modalities) - len(names),
        }


@rendered("learning curves")
def learning_curves(
    epochs: Sequence[int],
    losses: Mapping[str, Sequence[Any]],
    metric: str,
    scores: Mapping[str, Sequence[Any]],
    best: int,
) -> Any:
    """Draw losses and a validation metric, if there is one, over epochs, with the kept epoch."""
    figure, (left, right) = panel_grid([True, bool(scores)], 1.9, share=False)
    shown = np.unique(np.linspace(0, len(epochs) - 1, min(len(epochs), MAX_POINTS)).astype(int))
    x = np.asarray(epochs)[shown]
    marker = "o" if len(x) == 1 else ""
    colours, dashes = cycle(COLOURS), cycle(["--"] * 6 + [":"] * 6 + ["-."] * 6)
    for axes, curves, title in (
        (left, losses, "loss"),
        (right, scores, f"{metric} on validation data"),
    ):
        if not curves:
            continue
        for (name, values), colour in zip(curves.items(), colours, strict=False):
            y = np.array([np.nan if v is None else v for v in values], dtype=float)[shown]
            style = "-" if axes is left or name == FUSION else next(dashes)
            axes.plot(x, y, style, color=colour, label=name, marker=marker)
        axes.axvline(best, color=INK, linestyle=":", linewidth=1)
        axes.set_title(title)
        axes.locator_params("x", integer=True, nbins=5)
        if len(x) == 1:
            axes.set_xticks(x)
    return finish(figure, "epoch")


@rendered("predicted over true numbers, and how the errors are distributed")
def residuals(numbers: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """Draw predicted over true numbers (N,), and a histogram of their difference, by target."""
    figure, grid = panel_grid([True] * 2 * len(numbers), 1.9, share=False)
    for place, (name, (true, predicted)) in enumerate(numbers.items()):
        cloud, bars = grid[2 * place : 2 * place + 2]
        drawn = np.linspace(0, len(true) - 1, min(len(true), MAX_DOTS)).astype(int)
        ends = [float(true.min()), float(true.max())]
        cloud.plot(ends, ends, color=INK, linestyle=":", linewidth=1)
        cloud.plot(true[drawn], predicted[drawn], "o", color=COLOURS[0], markersize=3)
        cloud.set(xlabel=f"true {name}", ylabel="predicted")
        error = (predicted - true).numpy()
        bars.hist(error[np.isfinite(error)], bins=20, color=COLOURS[0])
        bars.axvline(0, color=INK, linestyle=":", linewidth=1)
        bars.set(xlabel=f"predicted - true {name}", ylabel="samples")
        for axes in (cloud, bars):
            axes.locator_params("x", nbins=4)
        bars.locator_params("y", integer=True)
    return finish(figure)
