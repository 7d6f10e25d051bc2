"""Write what of the docs is generated: `make docs`.

`zoo.md`, `balance.md` and the README's table of names from the registries, and the tables of
measured figures in `which.md` and `balance.md`, with the plot `missing.svg`, from results/.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from fusionzoo import list_datasets, list_encoders, list_fusions
from fusionzoo.benchmark.report.summary import CHOSEN_ALONE, MEAN_ALONE
from fusionzoo.benchmark.strategies import LINEAR
from fusionzoo.evaluation.statistics import seed_interval
from fusionzoo.structures import KINDS
from fusionzoo.training.balance import BALANCE as STRATEGIES
from fusionzoo.zoo.cards import FAMILIES, balance_markdown, cards, count, markdown

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
BALANCE = """\
## Measured

`python perf/balance.py` makes one modality dominant in two ways and trains with every strategy at
its defaults (`reconboost` with stages of one epoch, `opm` from the second epoch on, `relearn` every
two; `comm`, which needs augmented views, is left out). Below, test accuracy of the fusion, its
difference from plain training on the same seed with a 95 % interval (t over seeds, not corrected
for the number of comparisons), the seeds that gained, and the time of training over plain's,
teachers and trial epochs included. What helps with one imbalance may hurt with the other: compare
strategies on your data (`benchmark.py --balance none,mla,ogm_ge`).

### By rate: `digits`, text learns ten times as fast as image and audio

{rate}
### By content: `situations` (starved), one modality shows most classes plainly

The other shows the rest, in a way that takes longer to learn.

{content}"""
BALANCE_TABLE = """\
{seeds} seeds, {epochs} epochs; {plain:.3f} with plain training.

| strategy | accuracy | points over plain | seeds that gained | time |
| --- | --- | --- | --- | --- |
{lines}
"""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
ABSENT = "<!-- missing: begin -->", "<!-- missing: end -->"
CLEARLY = 0.02  # by how much a figure has to stand above another: more than the spread over seeds
MISSING = """\
![accuracy with modalities missing, of all fusions](missing.svg) [All figures, subset by
subset](../results/missing.csv).

Hollow: trained on complete samples; filled: with `--balance modality_dropout`; dashed: `late_mean`
trained with it. Means over {seeds} seeds and the six subsets of one or two strips.

`late_mean` reaches {complete:.3f} trained on complete samples and {dropout:.3f} with
`modality_dropout`; with a loss for each head ([`ume`](zoo.md#ume)) {ume:.3f} and
{ume_dropout:.3f}. More than {points:.0f} points above {dropout:.3f} stand

- trained on complete samples: {above_complete};
- with `modality_dropout`: {above_dropout}.

`modality_dropout` changes the accuracy on incomplete samples by {gain:+.1f} points (median over
fusions), that on complete ones by {price:+.1f}. So, on this data: {best_complete} if training is to
stay as it is; else `--balance modality_dropout`, with {best_dropout} first."""
UNKNOWN = "not measured"
REPORTS = ("stamps", "digits", "mfeat")  # in results/benchmark
BASELINES = (CHOSEN_ALONE, MEAN_ALONE, LINEAR[0])
NAMES = "<!-- names: begin -->", "<!-- names: end -->"
MODELS = {  # what stands behind the names of encoders that take a model's name
    "timm/*": "timm/<any model>",
    "torchvision/*": "torchvision/<any model>",
    "mel/*": "mel/<any timm model>",
    "hf/*": "hf/<hub name or folder>",
    "hf-clip/*": "hf-clip/<CLIP, SigLIP or CLAP>",
    "torchaudio/*": "torchaudio/<bundle>",
}


def measured() -> str:
    """Return the table of figures: two baselines, then one row for each fusion."""
    scores = {data: leaderboard(data) for data in REPORTS}
    xor = {(row["fusion"], row["modalities"]): row["accuracy"] for row in _tasks("xor")}
    times = {row["fusion"]: row for row in rows("fusions") if row["tokens_times"] == "1"}
    lines = [
        f"| fusion | family | {' | '.join(f'`{x}`' for x in REPORTS)} |"
        " xor of 2 | xor of 3 | time | parameters |",
        f"| --- | --- |{' --- |' * len(REPORTS)} --- | --- | --- | --- |",
    ]
    for baseline in BASELINES:
        figures = [_figure(scores[data].get(baseline)) for data in REPORTS]
        lines.append(f"| {baseline} | baseline | {' | '.join(figures)} | | | | |")
    for card in sorted(cards(), key=lambda card: (FAMILIES.index(card.family), card.name)):
        cost = times.get(card.name)
        figures = (
            *(_figure(scores[data].get(card.name)) for data in REPORTS),
            *(f"{float(x):.2f}" if (x := xor.get((card.name, n))) else UNKNOWN for n in "23"),
            _figure(float(cost["ratio_to_concat_transformer"]) if cost else None),
            count(card.parameters),
        )
        lines.append(f"| `{card.name}` | {card.family} | {' | '.join(figures)} |")
    return "\n".join(lines)


def leaderboard(data: str) -> dict[str, float]:
    """Return the score of every strategy and baseline of a benchmark, over its folds."""
    summary = json.loads((RESULTS / "benchmark" / data / "summary.json").read_text())
    return {row["strategy"]: row["accuracy"] for row in summary["leaderboard"]}


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def balanced() -> str:
    """Return what each training strategy gained under each imbalance."""
    return BALANCE.format(rate=balance_table("balance"), content=balance_table("balance_content"))


def balance_table(name: str) -> str:
    """Return the table of one imbalance, the best strategy first."""
    runs: dict[str, list[dict[str, float]]] = {}
    for row in rows(name):
        runs.setdefault(row.pop("strategy"), []).append({k: float(x) for k, x in row.items()})
    plain = runs.pop("plain")
    seconds = sum(run["seconds"] for run in plain)
    lines = []
    for strategy, strategy_runs in runs.items():
        gains = [100 * (a["fused"] - b["fused"]) for a, b in zip(strategy_runs, plain, strict=True)]
        mean, low, high = seed_interval(gains)
        line = (
            f"| `{strategy}` | {fmean(run['fused'] for run in strategy_runs):.3f} |"
            f" {mean:+.1f} ({low:+.1f} to {high:+.1f}) | {sum(x > 0 for x in gains)} |"
            f" {sum(run['seconds'] for run in strategy_runs) / seconds:.1f} |"
        )
        lines.append((mean, line))
    return BALANCE_TABLE.format(
        seeds=len(plain),
        epochs=int(plain[0]["epochs"]),
        plain=fmean(run["fused"] for run in plain),
        lines="\n".join(line for _, line in sorted(lines, reverse=True)),
    )


def missing() -> str:
    """Return what the figures with missing modalities say, once they are measured."""
    if not (RESULTS / "missing.csv").is_file():
        return "Not measured yet."
    figures = incomplete()
    table = rows("missing")
    means = {(row["fusion"], row["training"]): row for row in table}
    base = figures["late_mean"]
    gain, price = (
        median(
            100 * (float(means[name, "modality_dropout"][x]) - float(means[name, "complete"][x]))
            for name in figures
        )
        for x in ("incomplete", "complete")
    )
    best = [sorted(figures, key=lambda name: -figures[name][side]) for side in (0, 1)]
    return MISSING.format(
        best_complete=f"[`{best[0][0]}`](zoo.md#{best[0][0]})",
        best_dropout=", ".join(f"[`{name}`](zoo.md#{name})" for name in best[1][:3]),
        seeds=table[0]["seeds"],
        complete=base[0],
        dropout=base[1],
        ume=figures["ume"][0],
        ume_dropout=figures["ume"][1],
        points=100 * CLEARLY,
        above_complete=_above(base[1], {name: pair[0] for name, pair in figures.items()}),
        above_dropout=_above(base[1], {name: pair[1] for name, pair in figures.items()}),
        gain=gain,
        price=price,
    )


def _above(bar: float, figures: dict[str, float]) -> str:
    """Name the fusions that stand clearly above a figure, the best first."""
    best_first = sorted(figures.items(), key=lambda pair: -pair[1])
    named = [f"`{name}` {x:.3f}" for name, x in best_first if x > bar + CLEARLY]
    return ", ".join(named) or "none"


def incomplete() -> dict[str, tuple[float, float]]:
    """Return the accuracy on incomplete samples: {fusion: (trained complete, with dropout)}."""
    by_training: dict[str, dict[str, float]] = {"complete": {}, "modality_dropout": {}}
    for row in rows("missing"):
        by_training[row["training"]][row["fusion"]] = float(row["incomplete"])
    plain, dropout = by_training.values()
    return {name: (plain[name], dropout[name]) for name in plain}


def missing_plot() -> str:
    """Draw both figures of each fusion as SVG, the best on top."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figures = sorted(incomplete().items(), key=lambda pair: max(pair[1]))
    places = range(len(figures))
    style = {"svg.hashsalt": "fusionzoo", "svg.fonttype": "none", "font.size": 8}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7, 0.16 * len(figures) + 0.8), layout="constrained")
        axes = figure.subplots()
        for place, (_, pair) in zip(places, figures, strict=True):
            axes.plot(pair, [place, place], color="#b4b4b4", linewidth=1, zorder=1)
        for side, colour in ((0, "white"), (1, "#0072b2")):
            values = [pair[side] for _, pair in figures]
            axes.scatter(values, places, s=14, color=colour, edgecolors="#0072b2", zorder=2)
        axes.axvline(dict(figures)["late_mean"][1], color="#d55e00", linestyle="--", linewidth=1)
        axes.set_yticks(places, [name for name, _ in figures])
        axes.set_ylim(-1, len(figures))
        axes.set_xlabel("accuracy with one or two of three modalities")
        axes.grid(axis="x", color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def rows(name: str) -> list[dict[str, str]]:
    """Read one table of results."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _tasks(task: str) -> list[dict[str, str]]:
    return [row for row in rows("interactions") if row["task"] == task]


def which(text: str) -> str:
    """Put the measured figures in their places in which.md."""
    for (begin, end), content in (((BEGIN, END), measured()), (ABSENT, missing())):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    return text


def names(text: str) -> str:
    """Put the table of all components in its place in the README."""
    groups = {kind: [MODELS.get(name, name) for name in list_encoders(kind)] for kind in KINDS}
    groups |= {f"{family} fusion": list_fusions(family) for family in FAMILIES}
    groups |= {"training strategy": sorted(STRATEGIES), "data": list_datasets()}
    lines = ["| | names |", "| --- | --- |"]
    for group, members in groups.items():
        lines.append(f"| {group} | {', '.join(f'`{name}`' for name in members)} |")
    before, _, rest = text.partition(NAMES[0])
    table = "\n".join(lines)
    return f"{before}{NAMES[0]}\n{table}\n{NAMES[1]}{rest.partition(NAMES[1])[2]}"


PAGES: dict[str, Callable[[str], str]] = {
    "zoo.md": lambda _: markdown(),
    "balance.md": lambda _: f"{balance_markdown()}\n{balanced()}",
    "which.md": which,
    "../README.md": names,
    "missing.svg": lambda _: missing_plot(),
}


def main() -> None:
    for name, make in PAGES.items():
        if name == "missing.svg" and not (RESULTS / "missing.csv").is_file():
            continue
        path = DOCS / name
        path.write_text(make(path.read_text() if path.is_file() else ""))


if __name__ == "__main__":
    main()
