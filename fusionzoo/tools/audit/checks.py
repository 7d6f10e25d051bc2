"""Checks of values, labels and splits, and tables that describe the data."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc

from fusionzoo.datasets.media.arrays import file_of
from fusionzoo.datasets.media.formats import SUFFIXES
from fusionzoo.datasets.tables.paths import paths_in

from .scan import (
    ClassTable,
    Finding,
    ScannedData,
    Severity,
    Values,
    by_share,
    counted,
    normalised,
    singles,
)

SILENT = 1e-3  # of full scale, -60 dB: the peak below which a clip is silent
BLANK = 1.0  # grey levels of 255: standard deviation of the pixels of a blank image
FEW_LETTERS = 2  # a text with fewer is nearly empty, where others have words
USUAL_WORDS = 3  # median length from which texts count as such others
MAX_FILES = 1_000_000  # below the folder, when looking for files that no row names
MAX_LISTED = 1000  # names of files in a finding

REFUSALS = {  # kind of refusal -> what it is, what to do
    "duplicate_id": ("row with the id of another", "give every row an id of its own"),
    "empty_id": ("row without an id", "fill the id, or remove the column: rows are then numbered"),
    "empty_sample": ("row without a value in any modality", "remove these rows"),
    "path": ("cell with a path that may not be read", "move the files into the folder"),
    "split": ("row without a split", "complete the column"),
    "column": ("column with the name of another", "the first of them is used here"),
    "file": ("file that does not fit into the folder's layout", "move or remove these files"),
}
# Characters that the bytes 80 to FF of UTF-8 become when read as Latin-1 or cp1252.
HIGH = "\u0080-\u00ff" + "".join(bytes([x]).decode("cp1252", "ignore") for x in range(0x80, 0xA0))
RUN = re.compile(f"[{HIGH}]{{2,}}")
REPLACEMENT = "\ufffd"
MOST_IMBALANCE = 10  # the largest class over the smallest
MOST_MISSING = 0.5  # share of a modality's values
LEAST_DIFFERENCE = 0.2  # of missing rates between classes or splits
SURE = 1e-4  # p-value below which a difference is not chance
MIN_SUPPORT = 5  # samples of a class, before its words are judged
NAME_SHARE = 0.3  # of a class's texts that name it
NAME_LIFT = 5.0  # times as often as other classes' texts do
RULE_PRECISION, RULE_RECALL = 0.95, 0.8  # of a word that stands for a class
MAX_SHOWN = 5  # classes or words named in a message
MAX_CLASSES = 30  # rows of a table


def refused(scan: ScannedData) -> Iterator[Finding]:
    """Everything for which opening the data set raises an error; one finding per kind, column."""
    keys = dict.fromkeys((x.kind, x.column) for x in scan.refusals)
    for kind, column in keys:
        refusals = [x for x in scan.refusals if (x.kind, x.column) == (kind, column)]
        noun, advice = REFUSALS[kind]
        first, _, rest = noun.partition(" ")
        details = {x.row: x.message for x in refusals if x.row is not None}
        yield Finding(
            check=kind,
            severity="error",
            modality=column,
            message=f"{counted(len(refusals), first)} {rest}: {refusals[0].message}",
            advice=advice,
            groups=singles(details),
            details=details,
            files=tuple(x.message for x in refusals if x.row is None)[:MAX_LISTED],
        )


def unreadable(scan: ScannedData) -> Iterator[Finding]:
    """Values that cannot be decoded."""
    for values in scan.values.values():
        yield from _of_values(
            values,
            values.errors,
            "unreadable",
            f"cannot be decoded: {next(iter(values.errors.values()), '')}",
            advice="fix the files; --data.on_error missing or skip trains without them",
            severity="error",
            details=values.errors,
        )


def silent(scan: ScannedData) -> Iterator[Finding]:
    """Clips without sound; a constant offset is no sound."""
    for values in _of_kind(scan, "audio"):
        chosen = values.numbers["peak"] < SILENT
        rows = values.rows[chosen]
        yield from _of_values(values, rows, "silent", "are silent (peak below -60 dB)", "clip")


def blank(scan: ScannedData) -> Iterator[Finding]:
    """Images of one colour; vectors and sequences of one number."""
    for values in scan.values.values():
        if values.kind in ("text", "audio") or "spread" not in values.numbers:
            continue
        is_image = values.kind == "image"
        chosen = values.numbers["spread"] <= (BLANK if is_image else 0.0)
        if not is_image:  # a single entry is always constant
            chosen &= values.numbers["length"] * values.numbers["dim"] > 1
        noun, problem = ("image", "are of one colour") if is_image else ("value", "are constant")
        yield from _of_values(values, values.rows[chosen], "blank", problem, noun)


def _of_values(
    values: Values,
    rows: Collection[int] | NDArray[np.int64],
    check: str,
    problem: str,
    noun: str = "value",
    *,
    advice: str = "empty these cells: a fusion handles a missing value, not an empty one",
    severity: Severity | None = None,
    details: Mapping[int, str] | None = None,
) -> Iterator[Finding]:
    """Say how many of a modality's values have a problem, if any; how severe follows from that."""
    if len(rows):
        yield Finding(
            check=check,
            severity=severity or by_share(len(rows), values.total),
            modality=values.name,
            message=f"{len(rows):,} of {counted(values.total, noun)} {problem}",
            advice=advice,
            groups=singles(rows),
            details=details or {},
        )


def near_empty_text(scan: ScannedData) -> Iterator[Finding]:
    """Texts without letters and digits, or with a single one where others have words."""
    for values in _of_kind(scan, "text"):
        letters, usual = values.numbers["letters"], np.median(values.numbers["words"])
        chosen = letters < (FEW_LETTERS if usual >= USUAL_WORDS else 1)
        # A letter of a script without an alphabet may be a word.
        pairs = list(zip(values.texts, letters, strict=True))
        chosen &= np.array([text.isascii() or n == 0 for text, n in pairs])
        places = np.flatnonzero(chosen)
        details = {int(values.rows[place]): repr(values.texts[place]) for place in places}
        problem = "have almost no letters"
        yield from _of_values(
            values, details, "near_empty_text", problem, "text", severity="warning", details=details
        )


def encoding_damage(scan: ScannedData) -> Iterator[Finding]:
    """Replacement characters, control characters, and UTF-8 read in another encoding (`Ã©`)."""
    for values in _of_kind(scan, "text"):
        damage = {
            int(row): problem
            for row, text in zip(values.rows, values.texts, strict=True)
            if (problem := damaged_text(text))
        }
        problem = f"look damaged by a wrong encoding: {next(iter(damage.values()), '')}"
        advice = "export the file again as UTF-8, or name its encoding (--data.encoding)"
        yield from _of_values(
            values, damage, "encoding_damage", problem, "text", advice=advice, details=damage
        )


def damaged_text(text: str) -> str:
    """Return what is wrong with the characters of a text, or an empty string.

    >>> damaged_text("cafÃ© noir"), damaged_text("café «noir»")
    ("'Ã©' stands for 'é'", '')
    """
    if text.isascii():
        control = re.search(r"[\x00-\x08\x0b\x0e-\x1f\x7f]", text)
        return f"the control character {control[0]!r}" if control else ""
    if REPLACEMENT in text:
        return f"the replacement character {REPLACEMENT!r}"
    for run in RUN.findall(text):
        for start in range(len(run) - 1):
            for end in range(min(len(run), start + 4), start + 1, -1):
                intended = _intended(run[start:end])
                if intended:
                    return f"{run[start:end]!r} stands for {intended!r}"
    control = re.search(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]", text)
    return f"the control character {control[0]!r}" if control else ""


def _intended(run: str) -> str:
    """Return the character that a run of two to four is when read as UTF-8, or nothing."""
    for encoding in ("cp1252", "latin-1"):
        try:
            character = run.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        # Phonetic letters and accents of their own are what `É»` in `CAFÉ»` would become.
        is_usual = not "\u0250" <= character[:1] <= "\u036f"
        if len(character) == 1 and is_usual and unicodedata.category(character) != "Cn":
            return character
    return ""


def orphan_files(scan: ScannedData) -> Iterator[Finding]:
    """Media files below the folder that no row names."""
    dataset = scan.dataset
    names = [name for name in dataset.paths if name not in dataset.memory]
    if not scan.files_are_listed or dataset.root is None or not names:
        return
    suffixes = {x for name in names for x in SUFFIXES.get(dataset.modalities.get(name, ""), ())}
    top = os.path.realpath(dataset.root)
    named = {os.path.realpath(scan.manifest)} if scan.manifest else set()
    for name in names:
        if name in dataset.table.column_names:
            files_of_cells = {file_of(path) for _, path in paths_in(dataset.table[name])}
            named |= {os.path.normpath(os.path.join(top, path)) for path in files_of_cells}
    files: list[str] = []
    for number, path in enumerate(_files(top)):
        if number >= MAX_FILES:
            break
        if os.path.splitext(path)[1].lower() in suffixes and path not in named:
            files.append(os.path.relpath(path, top))
    if files:
        yield Finding(
            check="orphan_files",
            severity="warning",
            message=f"no row names {len(files):,} of the media files below {dataset.root}:"
            f" {', '.join(sorted(files)[:3])}{', ...' if len(files) > 3 else ''}",
            advice="add rows for them, or move them elsewhere",
            files=tuple(sorted(files)[:MAX_LISTED]),
        )


def _files(top: str) -> Iterator[str]:
    """Yield the files below a folder, hidden ones left out."""
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield str(Path(folder) / name)


def _of_kind(scan: ScannedData, kind: str) -> Iterator[Values]:
    return (values for values in scan.values.values() if values.kind == kind and len(values.rows))


def unlabelled(scan: ScannedData) -> Iterator[Finding]:
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


def splits(scan: ScannedData) -> Iterator[Finding]:
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
            severity: Severity = "error" if name == "train" else "warning"
            advice = "assign samples to it, or remove the split column for a split by hash"
            if name == "val":
                severity = "note"
                advice = (
                    "nothing to do: training holds out a tenth of train (--data.val_share), or with"
                    " --train.select last needs none"
                )
            yield Finding(
                check="missing_split",
                severity=severity,
                message=f"there is no split {name!r}; those that are: {', '.join(counts)}",
                advice=advice,
            )


def absent_class(scan: ScannedData) -> Iterator[Finding]:
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


def class_balance(scan: ScannedData) -> Iterator[Finding]:
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


def missing_rates(scan: ScannedData) -> Iterator[Finding]:
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
        by = (("class", labels, scan.classes), ("split", names, scan.split_names))
        for noun, groups, chosen in by:
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


def label_in_text(scan: ScannedData) -> Iterator[Finding]:
    """Texts that name their class, and words that stand for a class; in the training split."""
    if len(scan.classes) < 2:
        return
    for values in _of_kind(scan, "text"):
        chosen = scan.splits[values.rows] == "train"
        chosen &= np.array([scan.labels[row] is not None for row in values.rows])
        rows = values.rows[chosen]
        texts = [normalised(values.texts[x]) for x in np.flatnonzero(chosen)]
        labels = [str(x) for x in scan.labels[rows]]
        named = _named_classes(texts, labels, scan.classes)
        rules = _one_word_rules(texts, labels)
        rules = {name: rule for name, rule in rules.items() if name not in named}
        for check, words in (("class_name_in_text", named), ("one_word_rule", rules)):
            if words:
                yield _giveaway(values, rows, texts, labels, check, words)


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
    verb = "names the class" if name == "class_name_in_text" else "predicts the class by one word"
    return Finding(
        check=name,
        severity="warning",
        modality=values.name,
        message=f"{values.name} {verb}: {'; '.join(shown)}{more}",
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


def class_table(scan: ScannedData) -> ClassTable:
    """Count samples of each class by split, and how many of them lack each modality."""
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
    return ClassTable(header, tuple(rows))
