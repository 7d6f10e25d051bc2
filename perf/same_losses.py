"""Compare training with an older revision, bit for bit: `python perf/same_losses.py REVISION`.

The older revision is checked out beside the working tree; both train the same small runs on this
machine, and the loss of every step and the final weights must be equal. No number is stored: the
last bits differ between CPUs. `--only digits` runs the cases so named. Exit code 1 where anything
differs.

Names may change between revisions, so losses are read from metrics.jsonl (`event` and `loss`), and
weights are compared by name, or, where names changed, in the order in which the folder stores them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
EVERY_STEP = ["--train.log_every", "1", "--log", "none", "--seed", "0", "--preset", "none"]
MISSING = ["--data.missing", "0.3"]
STRATEGIES = ["--balance", "ogm_ge,modality_dropout", "--train.ema", "0.99"]
CASES = {
    "digits": ["--train.epochs", "2"],
    # 20 steps: some 550 training samples.
    "stamps": [
        "--config",
        "configs/stamps.yaml",
        "--train.epochs",
        "1",
        "--train.batch_size",
        "28",
    ],
    "strategies": ["--fusion.name", "mbt", "--train.epochs", "1", *MISSING, *STRATEGIES],
    "two_processes": ["--dist.nproc", "2", "--train.epochs", "1", *MISSING],
}


def main() -> int:
    """Run every case in both trees; print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", help="what to compare the working tree with, say HEAD~3")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parsed = parser.parse_args()
    table = Table("case", "steps", "losses", "weights")
    differs = False
    with checkout(parsed.revision) as older, TemporaryDirectory() as scratch:
        for name in parsed.only:
            runs = [Path(scratch) / f"{name}-{place}" for place in ("older", "this")]
            for tree, run in zip((older, ROOT), runs, strict=True):
                train(tree, [*CASES[name], *EVERY_STEP, "--out", str(run)])
            losses, weights = compare_losses(*runs), compare_weights(*runs)
            differs |= bool(losses or weights)
            steps = str(len(read_losses(runs[0])))
            table.add_row(name, steps, losses or "equal", weights or "equal")
    Console().print(table)
    return int(differs)


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check a revision out into a temporary folder, and remove it afterwards."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> None:
    """Run a git command in this repository."""
    subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True)


def train(tree: Path, settings: list[str]) -> None:
    """Run `train.py` of a tree with that tree's package."""
    # The script takes its own folder off sys.path; PYTHONPATH stands before an editable install.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "train.py", *settings],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"train.py of {tree} failed:\n{done.stdout}\n{done.stderr}")


def read_losses(run: Path) -> list[float]:
    """Return the loss of every step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


def compare_losses(older: Path, this: Path) -> str:
    """Return where the losses differ first; an empty string where they do not."""
    before, after = read_losses(older), read_losses(this)
    if not before or len(before) != len(after):
        return f"{len(before)} steps, then {len(after)}"
    for step, (x, y) in enumerate(zip(before, after, strict=True), 1):
        if x != y:
            return f"step {step}: {x!r}, then {y!r}"
    return ""


def compare_weights(older: Path, this: Path) -> str:
    """Return how far the final weights are apart; an empty string where they are equal."""
    before, after = (load_file(run / "model" / "model.safetensors") for run in (older, this))
    if before.keys() <= after.keys():  # the folder may have gained tensors, say of new heads
        after = {name: after[name] for name in before}
    pairs = list(zip(before.values(), after.values(), strict=False))
    if len(before) != len(after) or any(x.shape != y.shape for x, y in pairs):
        return f"{len(before)} tensors, then {len(after)}, or of other shapes"
    if all(torch.equal(x, y) for x, y in pairs):
        return ""
    largest = max(float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel())
    return f"up to {largest:.1e} apart"


if __name__ == "__main__":
    sys.exit(main())
