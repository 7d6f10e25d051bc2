"""Hold fusions and strategies against their authors' code: `python perf/authors.py CLONES`.

CLONES holds clones of the repositories that perf/_authors/ names, of which nothing is copied here.
Of each fusion both modules are built, the authors' weights are copied, and 32 random samples run
through both, without dropout (`embracenet` as in training, where both draw). Encoders inside the
authors' module are stood in for by layers that give the features themselves; layers of ours that it
has not are the identity. Writes results/authors.csv: parameters of each part, the root mean square
of its matrices before the copy (initial spread), and the greatest difference of the logits, or of
the embedding if no classifier follows (as log(1 + evidence) where the authors give evidence), and
of the mean loss. Of training strategies functions are cut out of the authors' scripts and run on
the same numbers: losses, shares, gradients after one step. Seconds on one core.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from _authors.attention import ATTENTION
from _authors.case import COLUMNS, compare
from _authors.early import EARLY
from _authors.hybrid import HYBRID
from _authors.late import LATE
from _authors.strategies import STRATEGIES, compare_functions

ROOT = Path(__file__).parents[1]
CASES = (*LATE, *EARLY, *ATTENTION, *HYBRID)


def main() -> None:
    """Compare every case and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clones", type=Path, help="folder with a clone of each repository")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "authors.csv")
    parser.add_argument("--only", nargs="*", help="fusions and strategies; other rows stay")
    flags = parser.parse_args()

    def is_chosen(name: str) -> bool:
        return flags.only is None or name in flags.only

    with flags.out.open(newline="") as file:
        kept = [row for row in [*csv.reader(file)][1:] if not is_chosen(row[0])]
    rows = [row for x in CASES if is_chosen(x.fusion) for row in compare(x, flags.clones)]
    functions = (x for x in STRATEGIES if is_chosen(x.strategy))
    rows += [row for x in functions for row in compare_functions(x, flags.clones)]
    with flags.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *kept, *rows])
    for row in rows:
        print(*row, sep="  ")


if __name__ == "__main__":
    main()
