"""Write what of the docs is generated: `make docs`.

`zoo.md` and `balance.md` from the registries, and the table of measured figures in `which.md` from
results/*.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from fusionzoo.cards import FAMILIES, balance_markdown, cards, count, markdown

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


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
        own = numerals[one.name]
        accuracy = f"{float(own['mean']):.3f} ± {float(own['deviation']):.3f}"
        accuracy += "" if own["seeds"] == "10" else f" ({own['seeds']} seeds)"
        ratio = float(times[one.name]["ratio_to_concat_transformer"])
        lines.append(
            f"| `{one.name}` | {one.family} | {accuracy} | {float(xor[one.name, '2']):.2f} |"
            f" {float(xor[one.name, '3']):.2f} | {ratio:.3f} | {count(one.parameters)} |"
        )
    return "\n".join(lines)


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


PAGES: dict[str, Callable[[str], str]] = {
    "zoo.md": lambda _: markdown(),
    "balance.md": lambda _: balance_markdown(),
    "which.md": which,
}


def main() -> None:
    for name, make in PAGES.items():
        path = DOCS / name
        path.write_text(make(path.read_text() if path.is_file() else ""))


if __name__ == "__main__":
    main()
