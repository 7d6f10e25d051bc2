"""Tables that describe the data: classes, missing values, lengths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .findings import Facts
from .scan import Scan

MAX_CLASSES = 30  # rows of a table
BINS = 8  # of a histogram
MEASURES = {  # kind -> (number, title, unit)
    "text": (("words", "words of a text"),),
    "audio": (("seconds", "seconds of a sound"),),
    "image": (("width", "width of a picture, pixels"), ("height", "height of a picture, pixels")),
    "sequence": (("length", "steps of a sequence"),),
}


def class_table(scan: Scan) -> Iterator[Facts]:
    """Samples of each class by split, and how many of them lack each modality."""
    splits = scan.split_names
    missing = ~scan.dataset.present.numpy()
    labels, names = scan.labels[scan.rows].astype(str), scan.splits[scan.rows]
    classes = scan.classes
    shown = classes if len(classes) <= MAX_CLASSES else classes[: MAX_CLASSES - 1]
    groups = [(f"{label}", labels == label) for label in shown]
    if len(shown) < len(classes):
        rest = np.isin(labels, classes[len(shown) :])
        groups.append((f"{len(classes) - len(shown)} smaller classes", rest))
    groups.append(("all", np.ones(len(labels), bool)))
    rows = []
    for title, chosen in groups:
        counts = [f"{int((chosen & (names == split)).sum()):,}" for split in splits]
        rates = [f"{missing[chosen, column].mean():.1%}" for column in range(missing.shape[1])]
        rows.append((title, *counts, *rates))
    header = ("class", *splits, *(f"{name} missing" for name in scan.dataset.modalities))
    yield Facts("Samples by class and split, and missing values", header, tuple(rows))


def length_tables(scan: Scan) -> Iterator[Facts]:
    """Histograms of text lengths, durations and picture sizes."""
    for values in scan.values.values():
        for key, title in MEASURES.get(values.kind, ()):
            if len(values.rows):
                yield _histogram(f"{values.name}: {title}", values.numbers[key])


def _histogram(title: str, numbers: NDArray[np.float64]) -> Facts:
    """Count numbers in bins of equal width, or of equal ratio if they span more than 20 times."""
    low, high = float(numbers.min()), float(numbers.max())
    if low == high:
        return Facts(title, ("range", "values"), ((_short(low), f"{len(numbers):,}"),))
    spread = low > 0 and high > 20 * low
    edges = np.geomspace(low, high, BINS + 1) if spread else np.linspace(low, high, BINS + 1)
    if (numbers % 1 == 0).all():
        edges = np.unique(np.concatenate([[low], np.ceil(edges[1:-1]), [high]]))
    counts, edges = np.histogram(numbers, edges)
    last = len(counts) - 1
    rows = [
        (f"{_short(low)} to {'' if i == last else 'below '}{_short(high)}", f"{count:,}")
        for i, (low, high, count) in enumerate(zip(edges[:-1], edges[1:], counts, strict=True))
    ]
    return Facts(title, ("range", "values"), tuple(rows))


def _short(number: float) -> str:
    """Write a number with three digits, or all digits of a whole part that has more.

    >>> _short(0.51466), _short(1136.0)
    ('0.515', '1,136')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
