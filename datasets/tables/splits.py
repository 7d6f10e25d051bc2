"""Splits: by a hash of id or group, and other people's names of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError
from fusionzoo.targets import kind_of, label_word, words

from .arrow import ArrowColumn, flat

SPLITS = ("train", "val", "test")
SHARES = (0.70, 0.15, 0.15)  # of data sets without a split column
BATCH = 1 << 16  # keys that are hashed at a time
MAX_NAMED = 3  # moved samples or groups that the data summary names
USUAL_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class MadeSplits(NamedTuple):
    """The splits of a table's rows, and which of them do not follow from the hash alone."""

    splits: pa.Array  # text, by row
    moved: dict[str, str]  # id or group -> the split it was moved to
    num_lacking: int  # classes that are too small to be in every split
    by_class: bool  # whether classes were looked at
    stratified: bool  # whether each class has the same shares

    @property
    def rule(self) -> str:
        """What was done beside the hash, for the data summary; empty: nothing."""
        text = ", with the same shares of every class" if self.stratified else ""
        if len(self.moved) > MAX_NAMED:
            text += f"; {len(self.moved):,} moved"
        elif self.moved:
            text += "; " + ", ".join(f"{key!r} moved to {x}" for key, x in self.moved.items())
        if self.moved:
            text += ", so that every split has every class" if self.by_class else ", else empty"
        if self.num_lacking and self.by_class:
            classes = "class is" if self.num_lacking == 1 else "classes are"
            text += f"; {self.num_lacking:,} {classes} too small for every split"
        return text


def split_by_hash(key: str, shares: Sequence[float] = SHARES, salt: str = "") -> str:
    """Assign a key to train, val or test by its hash, whatever other keys there are.

    >>> [split_by_hash(str(i)) for i in range(4)]
    ['train', 'train', 'val', 'train']
    """
    return SPLITS[int(_split_numbers(_hash_fractions(pa.array([f"{salt}{key}"])), shares)[0])]


def join_groups(
    keys: Mapping[str, Sequence[Hashable]], pairs: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """Return each item's group, named by a member: items with an equal key, and those of a pair.

    A pair may name others than the items, by way of which items are joined.

    >>> join_groups({"a": ["red"], "b": ["blue", 7], "c": [7], "d": [8]}, [("a", "x"), ("x", "d")])
    {'a': 'a', 'b': 'b', 'c': 'b', 'd': 'a'}
    """
    parent: dict[str, str] = {}

    def top(item: str) -> str:
        while (above := parent.setdefault(item, item)) != item:
            parent[item] = parent[above]
            item = above
        return item

    first: dict[Hashable, str] = {}  # key -> the first item that has it
    same = [(item, first.setdefault(key, item)) for item, own in keys.items() for key in own]
    for item, other in [*same, *pairs]:
        low, high = sorted((top(item), top(other)))
        parent[high] = low
    return {item: top(item) for item in keys}


def check_shares(shares: Sequence[float]) -> None:
    """Raise an error for shares that are not those of train, val and test."""
    if len(shares) != len(SPLITS) or min(shares) < 0 or not shares[0]:
        words = ", ".join(f"{share:g}" for share in shares)
        raise FusionZooError(f"shares ({words}): expected [train,val,test], such as [0.8,0,0.2]")


def makers_of_splits(settings: Mapping[str, Any]) -> list[str]:
    """Return the shared settings among these that make splits instead of the data's own."""
    return [x for x in ("random_splits", "split_file") if settings.get(x) not in (None, "")]


def describe_shares(shares: Sequence[float]) -> str:
    """Return shares in words, those of 0 left out.

    >>> describe_shares((4, 0, 1))
    '80 % train, 20 % test'
    """
    return ", ".join(
        f"{100 * share / sum(shares):.3g} % {name}"
        for name, share in zip(SPLITS, shares, strict=True)
        if share
    )


def make_splits(
    keys: ArrowColumn,
    labels: Sequence[ArrowColumn] = (),
    shares: Sequence[float] = SHARES,
    *,
    unique: bool = False,
) -> MadeSplits:
    """Assign each row to a split by the hash of its key, an id or a group; rows of a key share it.

    The first column of single labels stratifies: the keys of each class, a group's being its most
    frequent, are put in the order of their hashes and cut at the shares. Without such a column the
    hash alone decides, whatever else is in the table.

    Where that leaves a class without any row in a split, as happens to small classes and with few
    groups, the key nearest to the split's range is moved there, unless another class would then be
    missing where it comes from. `train` comes first, as nothing can be learnt of a class that is
    not in it.

    `keys` and `labels` are Arrow arrays; labels are text, or lists of text for several labels a
    row. A column with more than half as many classes as there are keys has no classes. `unique`
    says that no key occurs twice, which is faster.

    >>> make_splits(pa.array(["p1", "p2", "p3", "p2"])).splits.to_pylist()
    ['test', 'train', 'val', 'train']
    """
    check_shares(shares)
    key_of_row, names = np.arange(len(keys)), flat(keys)
    if not unique:
        encoded = names.dictionary_encode()
        key_of_row, names = encoded.indices.to_numpy(), encoded.dictionary
    fractions = _hash_fractions(names)
    keys_of, classes_of = [np.arange(len(names))], [np.zeros(len(names), np.int64)]  # any sample
    num_classes, stratified = 1, False
    for column in labels:
        rows, classes, words_of = _classes(column)
        if 0 < len(words_of) <= len(names) / 2:
            keys_of.append(key_of_row[rows])
            classes_of.append(classes + num_classes)
            num_classes += len(words_of)
            if not (stratified or pa.types.is_list(column.type)):
                stratified = True
                fractions = _stratified(fractions, keys_of[-1], classes, words_of)
    planner = _Planner(np.concatenate(keys_of), np.concatenate(classes_of), fractions, shares)
    planner.fill()
    splits = pa.array(SPLITS).take(pa.array(planner.split_of[key_of_row]))
    moved = {names[key].as_py(): SPLITS[split] for key, split in planner.moved.items()}
    lacking = (planner.counts == 0) & (np.asarray(shares) > 0)
    too_small = int(lacking[1:].any(1).sum())
    return MadeSplits(splits, moved, too_small, num_classes > 1, stratified)


def hold_out(
    splits: ArrowColumn, keys: ArrowColumn, labels: Sequence[ArrowColumn], share: float
) -> MadeSplits:
    """Return splits with a share of the keys of `train` in `val`, by `make_splits`.

    >>> column = pa.array([*["train"] * 4, "test"])
    >>> hold_out(column, pa.array([*"abcde"]), (), 0.25).splits.to_pylist()
    ['val', 'train', 'train', 'train', 'test']
    """
    rows = pa.array(np.flatnonzero(pc.equal(splits, "train").to_numpy(zero_copy_only=False)))
    made = make_splits(
        keys.take(rows), [column.take(rows) for column in labels], (1 - share, share, 0.0)
    )
    words = np.array(splits.to_pylist(), dtype=object)
    words[rows.to_numpy()] = made.splits.to_pylist()
    return made._replace(splits=pa.array(words, pa.string()))


def random_splits(keys: ArrowColumn, shares: Sequence[float], seed: int) -> pa.Array:
    """Draw each row's split at random; rows of a key, an id or a group, share it.

    The keys, in the order of their first rows, are put in the order of
    `numpy.random.RandomState(seed).permutation` and cut at the shares: what papers' code does with
    `numpy.random.seed(seed)` and `numpy.random.shuffle`.

    >>> random_splits(pa.array([*"abcde"]), (0.6, 0.0, 0.4), 0).to_pylist()
    ['train', 'train', 'train', 'test', 'test']
    """
    check_shares(shares)
    encoded = flat(keys).dictionary_encode()
    order = np.random.RandomState(seed).permutation(len(encoded.dictionary))
    bounds = np.cumsum(shares)[:-1] / sum(shares) * len(order)
    split_of_key = np.empty(len(order), np.int64)
    split_of_key[order] = np.searchsorted(
        np.floor(bounds + 1e-9), np.arange(len(order)), side="right"
    )
    return pa.array(SPLITS).take(pa.array(split_of_key[encoded.indices.to_numpy()]))


def splits_by_time(
    times: NDArray[np.float64], keys: ArrowColumn, shares: Sequence[float] = SHARES
) -> pa.Array:
    """Assign the earliest rows to train, the next to val and the latest to test.

    Rows of one time stay together, and so do those of a key, an id or a group, whose time is that
    of its last row: nothing of a later split is known in an earlier one.

    >>> splits_by_time(np.arange(4.0), pa.array([*"abac"]), (0.5, 0.25, 0.25)).to_pylist()
    ['val', 'train', 'val', 'test']
    """
    check_shares(shares)
    codes = flat(keys).dictionary_encode().indices.to_numpy()
    last = np.full(int(codes.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(last, codes, times)
    moments, moment_of = np.unique(last[codes], return_inverse=True)
    counts = np.bincount(moment_of, minlength=len(moments))
    before = (np.cumsum(counts) - counts / 2) / max(len(codes), 1)  # share up to the middle of each
    bounds = np.cumsum(shares)[:-1] / sum(shares)
    return pa.array(SPLITS).take(pa.array(np.searchsorted(bounds, before, side="right")[moment_of]))


def one_spelling(column: ArrowColumn) -> ArrowColumn:
    """Return a column of classes in the spelling of all formats: `1.0` is 1, `True` is true."""
    encoded = flat(column).dictionary_encode()
    known = encoded.dictionary.to_pylist()
    spelled = [label_word(cell) for cell in known]
    return column if spelled == known else pa.array(spelled, pa.string()).take(encoded.indices)


def class_columns(
    columns: Mapping[str, ArrowColumn], kinds: Mapping[str, str]
) -> list[ArrowColumn]:
    """Return the label columns with classes, for `make_splits`; `kinds` says what columns hold."""
    standard = {name: kind_of(kinds[name]).standard_kind() for name in columns if name in kinds}
    single = ("classification", "ordinal")
    labels = [
        columns[name] if standard[name] == "ordinal" else one_spelling(columns[name])
        for name in columns
        if standard.get(name) in single
    ]
    for name in columns:
        if standard.get(name) == "multilabel":
            encoded = flat(columns[name]).dictionary_encode()
            lists = [words(cell) for cell in encoded.dictionary.to_pylist()]
            labels.append(pa.array(lists, pa.list_(pa.string())).take(encoded.indices))
    return labels


class _Planner:
    """Moves keys until every class is in every split, as far as that is possible."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        classes: NDArray[np.int64],
        fractions: NDArray[np.float64],
        shares: Sequence[float],
    ) -> None:
        self.fractions, self.shares = fractions, shares
        self.split_of = _split_numbers(fractions, shares)
        self.pair_keys, self.pair_classes = keys, classes
        self.counts = self._count()
        self.moved: dict[int, int] = {}

    def fill(self) -> None:
        """Move keys into the splits that lack a class."""
        if self.counts[:, np.asarray(self.shares) > 0].all():
            return
        num_classes = len(self.counts)
        pairs = np.sort(self.pair_keys * num_classes + self.pair_classes)
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        self.pair_keys, self.pair_classes = pairs // num_classes, pairs % num_classes
        self.counts = self._count()
        by_class = np.argsort(self.pair_classes, kind="stable")
        bounds = np.searchsorted(self.pair_classes[by_class], np.arange(len(self.counts) + 1))
        for split, share in enumerate(self.shares):
            for label in np.flatnonzero(self.counts[:, split] == 0) if share else ():
                if not self.counts[label, split]:  # an earlier move may have filled it
                    members = self.pair_keys[by_class[bounds[label] : bounds[label + 1]]]
                    self._move_nearest(members.tolist(), split)

    def _count(self) -> NDArray[np.int64]:
        """Count the keys of each class in each split, int64 (classes, 3)."""
        cells = self.pair_classes * 3 + self.split_of[self.pair_keys]
        num_classes = int(self.pair_classes.max()) + 1
        return np.bincount(cells, minlength=3 * num_classes).reshape(-1, 3)

    def _move_nearest(self, keys: Iterable[int], split: int) -> None:
        movable = [key for key in keys if self._leaves_others(key)]
        if not movable and split == 0:
            movable = list(keys)
        if not movable:
            return
        middle = (sum(self.shares[:split]) + self.shares[split] / 2) / sum(self.shares)
        nearest = min(movable, key=lambda key: abs(self.fractions[key] - middle))
        classes = self._classes_of(nearest)
        self.counts[classes, self.split_of[nearest]] -= 1
        self.counts[classes, split] += 1
        self.split_of[nearest] = self.moved[nearest] = split

    def _leaves_others(self, key: int) -> bool:
        """Return whether the key's split keeps all classes if the key leaves it."""
        return bool((self.counts[self._classes_of(key), self.split_of[key]] > 1).all())

    def _classes_of(self, key: int) -> NDArray[np.int64]:
        first, last = np.searchsorted(self.pair_keys, [key, key + 1])
        return self.pair_classes[first:last]


def _stratified(
    fractions: NDArray[np.float64],
    keys: NDArray[np.int64],
    classes: NDArray[np.int64],
    words_of: pa.Array,
) -> NDArray[np.float64]:
    """Return the place of each key among those of its class, in the order of `fractions`, from 0
    to 1; keys without a class keep theirs.

    `keys` and `classes` are pairs that occur together, int64 (P,). A class begins at a hash of its
    name between two places, so that small classes do not all lack the same split.
    """
    num_classes = len(words_of)
    pairs, counts = np.unique(keys * num_classes + classes, return_counts=True)
    key_of, class_of = pairs // num_classes, pairs % num_classes
    starts = _hash_fractions(words_of)
    # The most frequent class of each key comes first; of equally frequent ones, that by name.
    order = np.lexsort((starts[class_of], -counts, key_of))
    first = order[np.diff(key_of[order], prepend=-1) > 0]
    key_of, class_of = key_of[first], class_of[first]
    order = np.lexsort((fractions[key_of], class_of))
    sizes = np.bincount(class_of, minlength=num_classes)
    ranks = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[class_of[order]]
    places = fractions.copy()
    places[key_of[order]] = (ranks + starts[class_of[order]]) / sizes[class_of[order]]
    return places


def _classes(column: ArrowColumn) -> tuple[NDArray[np.int64], NDArray[np.int64], pa.Array]:
    """Return the rows and class numbers of the labels in a column, and the classes' names."""
    column = flat(column)
    rows = np.arange(len(column))
    if pa.types.is_list(column.type):
        rows, column = pc.list_parent_indices(column).to_numpy(), pc.list_flatten(column)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    encoded = column.drop_null().dictionary_encode()
    codes = encoded.indices.to_numpy()
    return rows[valid].astype(np.int64), codes.astype(np.int64), encoded.dictionary


def _split_numbers(fractions: NDArray[np.float64], shares: Sequence[float]) -> NDArray[np.int64]:
    positions = fractions * sum(shares)
    in_train, in_val = positions < shares[0], positions < shares[0] + shares[1]
    return np.where(in_train, 0, np.where(in_val, 1, 2))


def _hash_fractions(keys: pa.Array) -> NDArray[np.float64]:
    """Return the hashes of an Arrow array of keys as numbers from 0 to 1."""
    keys, batches = keys.cast(pa.binary()), []
    for start in range(0, len(keys), BATCH):
        batch = keys.slice(start, BATCH).to_pylist()
        digests = b"".join([sha256(key).digest()[:8] for key in batch])
        batches.append(np.frombuffer(digests, dtype=">u8").astype(np.float64) / 2**64)
    return np.concatenate(batches) if batches else np.zeros(0)


def usual_splits(splits: ArrowColumn) -> tuple[ArrowColumn, dict[str, str]]:
    """Return a column of splits with the usual names, and the other names that it had.

    Case does not count. `dev` stays as it is beside another name for val, as it then is something
    else.

    >>> usual_splits(pa.array(["Train", "dev", "extra"]))[1]
    {'Train': 'train', 'dev': 'val'}
    """
    encoded = flat(splits).dictionary_encode()
    names = encoded.dictionary.to_pylist()
    present = {USUAL_NAMES.get(name.lower()) for name in names if name.lower() != "dev"}
    renamed = {}
    for name in names:
        usual = USUAL_NAMES.get(name.lower())
        is_other = name.lower() == "dev" and usual in present
        if usual is not None and name != usual and not is_other:
            renamed[name] = usual
    if not renamed:
        return splits, {}
    words = pa.array([renamed.get(name, name) for name in names])
    return words.take(encoded.indices), renamed


def renamed_splits(renamed: Mapping[str, str]) -> str:
    """Return what the data summary says of splits with other names."""
    return "".join(f", {word!r} read as {usual}" for word, usual in renamed.items())
