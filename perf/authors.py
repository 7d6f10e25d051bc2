"""Hold fusions against their authors' modules, weight for weight: `python perf/authors.py CLONES`.

CLONES holds clones of the repositories that perf/_authors/ names, of which nothing is copied here.
Of each fusion both modules are built, the authors' weights are copied, and 32 random samples run
through both, without dropout (`embracenet` as in training, where both draw). Encoders inside the
authors' module are stood in for by layers that give the features themselves; layers of ours that it
has not are the identity. Writes results/authors.csv: parameters of each part, the root mean square
of its matrices before the copy (initial spread), and the greatest difference of the logits, or of
the embedding if no classifier follows (as log(1 + evidence) where the authors give evidence), and
of the mean loss. Seconds on one core.
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

ROOT = Path(__file__).parents[1]
CASES = (*LATE, *EARLY, *ATTENTION, *HYBRID)


def main() -> None:
    """Compare every case and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clones", type=Path, help="folder with a clone of each repository")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "authors.csv")
    flags = parser.parse_args()
    rows = [row for case in CASES for row in compare(case, flags.clones)]
    with flags.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    for row in rows:
        print(*row, sep="  ")


if __name__ == "__main__":
    main()
