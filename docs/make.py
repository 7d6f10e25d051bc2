"""Write what of the docs is generated: `make docs`.

`zoo.md`, `balance.md` and the README's table of names from the registries, and the tables of
measured figures in `which.md` and `balance.md` from results/*.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from fusionzoo import list_datasets, list_encoders, list_fusions
from fusionzoo.evaluation.statistics import seed_interval
from fusionzoo.structures import KINDS
from fusionzoo.training.balance import BALANCE as STRATEGIES
from fusionzoo.zoo.cards import FAMILIES, balance_markdown, cards, count, markdown

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
BALANCE = """\
## Measured

`python perf/balance.py` makes one modality dominant in two ways and trains with every strategy at
its defaults (`reconboost` with stages of one epoch). Below, test accuracy of the fusion, its
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
    """Return the table of figures, one row for each fusion."""
    numerals = {row["fusion"]: row for row in rows("mfeat")}
    xor = {(row["fusion"], row["modalities"]): row["accuracy"] for row in _tasks("xor")}
    times = {row["fusion"]: row for row in rows("fusions") if row["tokens_times"] == "1"}
    lines = [
        "| fusion | family | `mfeat` | xor of 2 | xor of 3 | time | parameters |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(cards(), key=lambda one: (FAMILIES.index(one.family), one.name)):
        own = numerals.get(one.name)
        if own is None:
            blank = " | ".join(["not measured"] * 4)
            lines.append(f"| `{one.name}` | {one.family} | {blank} | {count(one.parameters)} |")
            continue
        accuracy = f"{float(own['mean']):.3f} ± {float(own['deviation']):.3f}"
        accuracy += "" if own["seeds"] == "10" else f" ({own['seeds']} seeds)"
        ratio = float(times[one.name]["ratio_to_concat_transformer"])
        lines.append(
            f"| `{one.name}` | {one.family} | {accuracy} | {float(xor[one.name, '2']):.2f} |"
            f" {float(xor[one.name, '3']):.2f} | {ratio:.3f} | {count(one.parameters)} |"
        )
    return "\n".join(lines)


def balanced() -> str:
    """Return what each training strategy gained under each imbalance."""
    return BALANCE.format(rate=balance_table("balance"), content=balance_table("balance_content"))


def balance_table(name: str) -> str:
    """Return the table of one imbalance, the best strategy first."""
    runs: dict[str, list[dict[str, float]]] = {}
    for row in rows(name):
        runs.setdefault(row.pop("strategy"), []).append({k: float(x) for k, x in row.items()})
    plain = runs.pop("plain")
    seconds = sum(one["seconds"] for one in plain)
    lines = []
    for strategy, own in runs.items():
        gains = [100 * (a["fused"] - b["fused"]) for a, b in zip(own, plain, strict=True)]
        mean, low, high = seed_interval(gains)
        line = (
            f"| `{strategy}` | {fmean(one['fused'] for one in own):.3f} |"
            f" {mean:+.1f} ({low:+.1f} to {high:+.1f}) | {sum(x > 0 for x in gains)} |"
            f" {sum(one['seconds'] for one in own) / seconds:.1f} |"
        )
        lines.append((mean, line))
    return BALANCE_TABLE.format(
        seeds=len(plain),
        epochs=int(plain[0]["epochs"]),
        plain=fmean(one["fused"] for one in plain),
        lines="\n".join(line for _, line in sorted(lines, reverse=True)),
    )


def rows(name: str) -> list[dict[str, str]]:
    """Read one table of results."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _tasks(task: str) -> list[dict[str, str]]:
    return [row for row in rows("interactions") if row["task"] == task]


def which(text: str) -> str:
    """Put the table in its place in which.md."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{measured()}\n{END}{rest.partition(END)[2]}"


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
}


def main() -> None:
    for name, make in PAGES.items():
        path = DOCS / name
        path.write_text(make(path.read_text() if path.is_file() else ""))


if __name__ == "__main__":
    main()
