"""Splits of a benchmark other than folds: drawn at random, or listed in files or columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.sources.table_files import read_split_file
from fusionzoo.datasets.tables.splits import SHARES, SPLITS
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.inputs.command import is_split_file, split_words
from fusionzoo.inputs.data import VAL_SHARE

SPREAD = "mean ± standard deviation over them"
HELD_OUT = "a tenth of train held out for validation"


def read_splits(cfg: BenchmarkConfig, dataset: PairedDataset) -> list[PairedDataset]:
    """Return a view of the data set for each split of `--splits` or `--repeats`; none without.

    A view has the samples of one split. Where it has no validation samples, a tenth of the training
    samples is held out. Errors name the file or column that cannot be used.
    """
    words = split_words(cfg)
    if cfg.repeats is not None:
        seeds, shares = range(cfg.seed, cfg.seed + cfg.repeats), cfg.data.get("shares", SHARES)
        views = [(f"seed {seed}", dataset.draw_splits(seed, shares)) for seed in seeds]
    else:
        views = [(word, _listed(dataset, word)) for word in words]
    return [_complete(view, name) for name, view in views]


def _listed(dataset: PairedDataset, word: str) -> PairedDataset:
    """Return the samples that a file or a column puts into splits."""
    if is_split_file(word):
        return dataset.with_splits(read_split_file(Path(word).expanduser()), word)
    columns = dataset.table.column_names
    if word not in columns:
        others = [name for name in columns if name not in ("id", "split", "target", "group")]
        raise FusionZooError(
            f"--splits {word}: neither a file, nor a column of {dataset.source}."
            f"{did_you_mean(word, others)}"
        )
    cells = map(str, dataset.chosen(word).fill_null("").to_pylist())
    split_of = {key: cell for key, cell in zip(dataset.ids, cells, strict=True) if cell.strip()}
    return dataset.with_splits(split_of, f"column {word!r}")


def _complete(view: PairedDataset, name: str) -> PairedDataset:
    """Return a view with a validation split; an error if it cannot be trained or tested on."""
    for split in ("train", "test"):
        if split not in view.splits:
            counts = ", ".join(f"{word} ({count:,})" for word, count in view.splits.items())
            raise FusionZooError(f"{name}: no sample is in {split}; there are {counts}")
    return view if "val" in view.splits else view.hold_out(VAL_SHARE)


def describe_splits(cfg: BenchmarkConfig, views: Sequence[PairedDataset]) -> str:
    """Say in a sentence what the splits are and whose validation samples were held out.

    `views` are those of `read_splits`.
    """
    count = f"{len(views)} {'random ' * (cfg.repeats is not None)}split{'s' * (len(views) > 1)}"
    if cfg.repeats is not None:
        shares = cfg.data.get("shares", SHARES)
        parts = [
            f"{100 * share / sum(shares):.3g} % {name}"
            for name, share in zip(SPLITS, shares, strict=True)
            if share
        ]
        last = cfg.seed + cfg.repeats - 1
        seeds = f"seed {last}" if cfg.repeats == 1 else f"seeds {cfg.seed} to {last}"
        text = f"{count} of {', '.join(parts)} ({seeds})"
    else:
        text = f"{count} as listed in {', '.join(split_words(cfg))}"
    held_out = ["held out as val" in view.provenance.split_rule for view in views]
    if any(held_out):
        some = "" if all(held_out) else f" in {sum(held_out)} of them"
        text += f", {HELD_OUT}{some}"
    return f"{text}; {SPREAD}" if len(views) > 1 else text
