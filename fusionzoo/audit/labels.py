"""Checks of labels and splits: classes, missing values by class, text that names the class."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc

from .findings import Finding, counted, singles
from .measure import normalised
from .scan import Scan, Values

MOST_IMBALANCE = 10  # the largest class over the smallest
MOST_MISSING = 0.5  # share of a modality's values
LEAST_DIFFERENCE = 0.2  # of missing rates between classes or splits
SURE = 1e-4  # p-value below which a difference is not chance
MIN_SUPPORT = 5  # samples of a class, before its words are judged
NAME_SHARE = 0.3  # of a class's texts that name it
NAME_LIFT = 5.0  # times as often as other classes' texts do
RULE_PRECISION, RULE_RECALL = 0.95, 0.8  # of a word that stands for a class
MAX_SHOWN = 5  # classes or words named in a message


def unlabelled(scan: Scan) -> Iterator[Finding]:
    """Samples without a label, where others have one."""
    labelled = np.array([scan.labels[row] is not None for row in scan.rows])
    if labelled.any() and not labelled.all():
        rows = scan.rows[~labelled]
        yield Finding(
            check="unlabelled",
            severity="error",
            message=f"{counted(len(rows), 'sample')} of {len(scan.rows):,} have no target",
            advice="label or remove them; with --targets a label may be missing",
            groups=singles(rows),
        )


def splits(scan: Scan) -> Iterator[Finding]:
    """Splits of one sample, and splits that are missing."""
    counts = Counter(scan.splits[scan.rows].tolist())
    for name in scan.split_names:
        if counts[name] == 1:
            rows = scan.rows[scan.splits[scan.rows] == name]
            yield Finding(
                check="split_of_one",
                severity="error",
                message=f"split {name!r} has one sample: no metric of it means anything",
                advice="move samples into it, or its sample elsewhere",
                groups=singles(rows),
            )
    for name in ("train", "val", "test"):
        if not counts[name]:
            yield Finding(
                check="missing_split",
                severity="error" if name == "train" else "warning",
                message=f"there is no split {name!r}; those that are: {', '.join(counts)}",
                advice="assign samples to it, or remove the split column for a split by hash",
            )


def absent_class(scan: Scan) -> Iterator[Finding]:
    """Classes without a sample in one of the splits."""
    classes = scan.classes
    labels, names = scan.labels[scan.rows].astype(str), scan.splits[scan.rows]
    for split in scan.split_names:
        absent = sorted({*classes} - {*labels[names == split]})
        if not absent or (names == split).sum() == 1:
            continue
        in_train = split == "train"
        rows = scan.rows[np.isin(labels, absent)]
        shown = ", ".join(map(repr, absent[:MAX_SHOWN])) + (", ..." * (len(absent) > MAX_SHOWN))
        yield Finding(
            check="absent_class",
            severity="error" if in_train else "warning",
            message=f"split {split!r} has no sample of {shown}",
            advice="a class that is not trained cannot be predicted: move samples to train"
            if in_train
            else f"move samples of each class to {split}: it is not measured there",
            groups=singles(rows) if in_train else (),
        )


def class_balance(scan: Scan) -> Iterator[Finding]:
    """Classes of very different sizes in the training split."""
    is_train = scan.splits[scan.rows] == "train"
    counts = Counter(str(x) for x in scan.labels[scan.rows[is_train]] if x is not None)
    sizes = [(counts[name], name) for name in scan.classes if counts[name]]
    if len(sizes) > 1 and max(sizes)[0] >= MOST_IMBALANCE * min(sizes)[0]:
        (most, large), (least, small) = max(sizes), min(sizes)
        yield Finding(
            check="imbalance",
            severity="warning",
            message=f"in train, class {large!r} has {most:,} samples and {small!r} has {least:,}",
            advice="--train.sampler class_weighted; judge by macro F1, not by accuracy",
        )


def missing_rates(scan: Scan) -> Iterator[Finding]:
    """Modalities that mostly lack values, or lack them in some classes or splits."""
    present = scan.dataset.present.numpy()
    labels, names = scan.labels[scan.rows].astype(str), scan.splits[scan.rows].astype(str)
    for column, modality in enumerate(scan.dataset.modalities):
        missing = ~present[:, column]
        if missing.mean() > MOST_MISSING:
            yield Finding(
                check="mostly_missing",
                severity="warning",
                modality=modality,
                message=f"{missing.mean():.0%} of the samples have no {modality}",
                advice="train with --balance modality_dropout, or leave the modality out",
            )
        for noun, groups, chosen in (
            ("class", labels, scan.classes),
            ("split", names, scan.split_names),
        ):
            rates = {name: float(missing[groups == name].mean()) for name in chosen}
            if len(rates) > 1 and _differ(missing, groups, chosen):
                high, low = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
                if rates[high] - rates[low] >= LEAST_DIFFERENCE:
                    yield Finding(
                        check=f"missing_by_{noun}",
                        severity="warning",
                        modality=modality,
                        message=f"{modality} is missing in {rates[high]:.0%} of {noun} {high!r} and"
                        f" in {rates[low]:.0%} of {low!r}",
                        advice="a model can read the class from what is missing: find out why"
                        if noun == "class"
                        else "measure on samples as incomplete as those of training",
                    )


def _differ(missing: NDArray[np.bool_], groups: NDArray[np.str_], names: list[str]) -> bool:
    """Return whether the missing rates of groups differ by more than chance (chi-squared test)."""
    table = np.array([[missing[groups == x].sum(), (~missing[groups == x]).sum()] for x in names])
    if not table.sum(0).all():
        return False
    expected = table.sum(0) * table.sum(1, keepdims=True) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    return bool(chdtrc(len(names) - 1, statistic) < SURE)


def label_in_text(scan: Scan) -> Iterator[Finding]:
    """Texts that name their class, and words that stand for a class; in the training split."""
    if len(scan.classes) < 2:
        return
    for values in scan.values.values():
        if values.kind == "text" and len(values.rows):
            chosen = scan.splits[values.rows] == "train"
            chosen &= np.array([scan.labels[row] is not None for row in values.rows])
            rows = values.rows[chosen]
            texts = [normalised(values.texts[x]) for x in np.flatnonzero(chosen)]
            labels = [str(x) for x in scan.labels[rows]]
            named = _named_classes(texts, labels, scan.classes)
            if named:
                yield _giveaway(values, rows, texts, labels, "class_name_in_text", named)
            rules = _one_word_rules(texts, labels)
            rules = {name: rule for name, rule in rules.items() if name not in named}
            if rules:
                yield _giveaway(values, rows, texts, labels, "one_word_rule", rules)


def _giveaway(
    values: Values,
    rows: NDArray[np.int64],
    texts: list[str],
    labels: list[str],
    name: str,
    words: dict[str, tuple[str, float, float]],
) -> Finding:
    examples = []
    for label, (word, *_) in words.items():
        pairs = zip(rows.tolist(), texts, labels, strict=True)
        examples += [row for row, text, x in pairs if x == label and f" {word} " in f" {text} "]
    shown = [
        f"{word!r} in {inside:.0%} of {label!r} and {outside:.1%} of the others"
        for label, (word, inside, outside) in list(words.items())[:MAX_SHOWN]
    ]
    more = f", and {len(words) - MAX_SHOWN} more classes" if len(words) > MAX_SHOWN else ""
    predicate = (
        "names the class" if name == "class_name_in_text" else "predicts the class by one word"
    )
    return Finding(
        check=name,
        severity="warning",
        modality=values.name,
        message=f"{values.name} {predicate}: {'; '.join(shown)}{more}",
        advice="remove the words unless texts at prediction time have them too",
        groups=singles(sorted(examples)),
    )


def _named_classes(
    texts: list[str], labels: list[str], classes: list[str]
) -> dict[str, tuple[str, float, float]]:
    """Return the classes whose name stands far more often in their texts than in others."""
    result = {}
    padded, sizes = [f" {text} " for text in texts], Counter(labels)
    for label in classes:
        phrase = normalised(label)
        inside = outside = 0
        for text, other in zip(padded, labels, strict=True) if phrase else ():
            if f" {phrase} " in text:
                inside, outside = inside + (other == label), outside + (other != label)
        rest = len(texts) - sizes[label]
        if sizes[label] < MIN_SUPPORT or not rest:
            continue
        share, other_share = inside / sizes[label], outside / rest
        if share >= NAME_SHARE and share >= NAME_LIFT * (other_share + 1 / rest):
            result[label] = (phrase, share, other_share)
    return result


def _one_word_rules(texts: list[str], labels: list[str]) -> dict[str, tuple[str, float, float]]:
    """Return the classes that one word predicts, with that word."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text, label in zip(texts, labels, strict=True):
        for word in set(text.split()):
            counts[word][label] += 1
    sizes = Counter(labels)
    result: dict[str, tuple[str, float, float]] = {}
    for word, by_label in counts.items():
        label, inside = by_label.most_common(1)[0]
        total, size = by_label.total(), sizes[label]
        if size < MIN_SUPPORT or len(sizes) < 2:
            continue
        if inside >= RULE_PRECISION * total and inside >= RULE_RECALL * size:
            share, other = inside / size, (total - inside) / (len(texts) - size)
            if label not in result or share > result[label][1]:
                result[label] = (word, share, other)
    return result
