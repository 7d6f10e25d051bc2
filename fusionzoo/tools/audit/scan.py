"""Decode every value of a data set once, and measure what the checks need."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.tables.paths import Refusal
from fusionzoo.datasets.tables.provenance import RowNumbers
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.ground.progress import progress_bar
from fusionzoo.structures import Clip

GRID = 16  # cells per side of an image's fingerprint
COLOURS = 4  # cells per side of the colours in it
BANDS, FRAMES = 32, 32  # of a clip's fingerprint
LOWEST, HIGHEST = 150.0, 3600.0  # Hz, of its bands
WINDOW = 0.064  # seconds
LISTEN = 30  # seconds from which a clip's fingerprint is taken
BLOCK = 60  # seconds of a long clip that are read at a time
FLOOR = 1e-5  # of the loudest band, -50 dB; below it a recording is its noise
TRIM = 0.1  # of the peak, -20 dB: quieter beginnings and ends, a codec's echo too, are cut off
MIN_FINGERPRINT = 256  # samples of audio; a shorter clip has no fingerprint
SHINGLE = 5  # characters
PERMUTATIONS = 64  # of a MinHash
MAX_SHINGLES = 50_000  # of one text

Floats = NDArray[np.float32]
_draws = np.random.default_rng(20260101)
_FACTORS = _draws.integers(1, 2**63, PERMUTATIONS).astype(np.uint64) | np.uint64(1)
_OFFSETS = _draws.integers(0, 2**63, PERMUTATIONS).astype(np.uint64)
CHUNK = 512  # values that are handed to the threads at a time
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
TOLERATED = 0.05  # share of a modality's values with a fault that training survives


@dataclass(frozen=True)
class Measurement:
    """Facts about one value; the same keys in `numbers` for all values of a kind."""

    digest: bytes
    numbers: dict[str, float]
    print: NDArray[Any] | None = None
    text: str = ""


def measure(kind: str, value: Any) -> Measurement:
    """Measure a decoded value, or several images or clips."""
    if isinstance(value, list):
        return _combined([measure(kind, item) for item in value])
    measures: dict[str, Callable[[Any], Measurement]]
    measures = {"image": measure_image, "text": measure_text, "audio": measure_audio}
    return measures.get(kind, measure_array)(value)


def _combined(items: list[Measurement]) -> Measurement:
    """Measure several images or clips: blank or silent if all are, as long as all together."""
    combine: dict[str, Callable[[list[float]], float]] = {"spread": max, "peak": max}
    combine |= {"width": min, "height": min}
    keys = items[0].numbers
    numbers = {key: combine.get(key, sum)([x.numbers[key] for x in items]) for key in keys}
    digest = hashlib.blake2b(b"".join(x.digest for x in items), digest_size=16).digest()
    prints = [x.print for x in items if x.print is not None]
    mean = np.mean(prints, axis=0).round().astype(prints[0].dtype) if prints else None
    return Measurement(digest, numbers, mean)


def measure_image(image: torch.Tensor) -> Measurement:
    """Measure uint8 (3, H, W): size, spread of its pixels, 16 x 16 grey cells and 4 x 4 colours."""
    _, height, width = image.shape
    step = max(1, min(height, width) // (4 * GRID))
    pixels = avg_pool2d(image.float()[None], step, ceil_mode=True) if step > 1 else image[None]
    pixels = pixels.float()
    grey = adaptive_avg_pool2d(pixels.mean(1, keepdim=True), GRID)[0].flatten()
    colours = adaptive_avg_pool2d(pixels, COLOURS)[0].flatten()
    spread = float(image.float().std(dim=(1, 2), correction=0).max())
    numbers = {"width": float(width), "height": float(height), "spread": spread}
    cells = torch.cat([grey, colours]).round().clamp(0, 255).to(torch.uint8).numpy()
    content = image.contiguous().numpy()
    return Measurement(_digest(content.shape, content), numbers, cells)


def normalised(text: str) -> str:
    """Return text in lower case without accents' variants, punctuation and double spaces.

    >>> normalised("  The CAT, sat!  ")
    'the cat sat'
    """
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def measure_text(text: str) -> Measurement:
    """Measure text: words, letters and digits, MinHash (Broder 1997) of its 5-character pieces."""
    plain = normalised(text)
    letters = len(plain) - plain.count(" ") - plain.count("_")
    words = float(plain.count(" ") + 1 if plain else 0)
    numbers = {"words": words, "letters": float(letters)}
    digest = hashlib.blake2b(plain.encode("utf-8", "replace"), digest_size=16).digest()
    return Measurement(digest, numbers, minhash(shingles(plain)), text)


def shingles(plain: str) -> NDArray[np.uint64]:
    """Return the distinct hashes of the text's pieces of `SHINGLE` characters."""
    codes = np.frombuffer(plain.encode("utf-32-le", "replace"), np.uint32).astype(np.uint64)
    mixed = np.zeros(min(max(1, len(codes) - SHINGLE + 1), MAX_SHINGLES), np.uint64)
    for place in range(min(SHINGLE, len(codes))):
        piece = codes[place : place + len(mixed)]
        mixed = (mixed ^ piece) * np.uint64(0x100000001B3) + np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def minhash(hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the smallest of the hashes under each permutation, uint32 (PERMUTATIONS,)."""
    permuted = (hashes[:, None] * _FACTORS + _OFFSETS) >> np.uint64(32)
    return permuted.min(0).astype(np.uint32)


def measure_audio(clip: Clip) -> Measurement:
    """Measure a clip: its seconds of sound, peak without its mean, and a spectral fingerprint.

    A long file is read in blocks of a minute.
    """
    digest = hashlib.blake2b(repr((clip.rate, clip.frames)).encode(), digest_size=16)
    low, high, head = np.inf, -np.inf, np.zeros(0, np.float32)
    for start in range(0, clip.frames, BLOCK * clip.rate):
        samples = clip.read(start, BLOCK * clip.rate).contiguous().numpy()
        digest.update(samples.tobytes())
        low, high = min(low, float(samples.min())), max(high, float(samples.max()))
        head = samples if start == 0 else head
    active = trimmed(head)
    numbers = {"active": len(active) / clip.rate, "peak": max(0.0, (high - low) / 2)}
    return Measurement(digest.digest(), numbers, fingerprint(active, clip.rate))


def trimmed(samples: Floats) -> Floats:
    """Remove the mean, and the quiet beginning and end."""
    samples = samples - samples.mean() if len(samples) else samples
    loud = np.flatnonzero(np.abs(samples) > TRIM * np.abs(samples).max(initial=0.0))
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples[:0]


def fingerprint(samples: Floats, rate: int) -> NDArray[np.int8]:
    """Return the changes of 32 bands over 32 equal parts of a trimmed clip, int8 (1024,).

    Log energies minus the mean of each band and of each part, so loudness, equalisation and steady
    tones cancel, and a copy in another format still matches. Zeros where nothing changes.
    """
    result = np.zeros(BANDS * FRAMES, np.int8)
    samples = samples[: LISTEN * rate]
    if len(samples) < MIN_FINGERPRINT:
        return result
    size = max(64, min(int(WINDOW * rate), len(samples) // 4))
    # At least one window per third of its length, so that no part of a long clip is skipped.
    count = FRAMES * max(1, int(np.ceil(3 * len(samples) / size / FRAMES)))
    starts = np.linspace(0, len(samples) - size, count).astype(int)
    windows = np.lib.stride_tricks.sliding_window_view(samples, size)[starts]
    power = np.abs(np.fft.rfft(windows * np.hanning(size).astype(np.float32), axis=1)) ** 2
    energy = (power @ _bands(size, rate)).reshape(FRAMES, -1, BANDS).mean(1)
    level = np.log(np.maximum(energy, FLOOR * energy.max()) + 1e-20)
    level = level - level.mean(0) - level.mean(1, keepdims=True) + level.mean()
    top = np.abs(level).max()
    return (level.ravel() * (127 / top)).astype(np.int8) if top > 0.01 else result


@lru_cache(maxsize=64)
def _bands(size: int, rate: int) -> Floats:
    """Return the share of each frequency bin that lies in each band, (size // 2 + 1, BANDS)."""
    edges = np.geomspace(LOWEST, min(HIGHEST, rate / 2.2), BANDS + 1) * size / rate
    centres = (edges[:-1] + edges[1:]) / 2
    low, high = np.minimum(edges[:-1], centres - 0.5), np.maximum(edges[1:], centres + 0.5)
    bins = np.arange(size // 2 + 1)[:, None]
    overlap = np.minimum(bins + 0.5, high) - np.maximum(bins - 0.5, low)
    return np.maximum(overlap, 0).astype(np.float32)


def measure_array(value: Any) -> Measurement:
    """Measure a vector or a sequence: its shape and the spread of its entries.

    Values of another kind, such as rows with words, are only compared.
    """
    array = np.asarray(value)
    if not array.ndim or array.dtype.kind not in "fiub":
        digest = hashlib.blake2b(repr(value).encode("utf-8", "replace"), digest_size=16).digest()
        return Measurement(digest, {"length": float(len(value)), "dim": 1.0, "spread": np.inf})
    spread = float(array.std()) if array.size else 0.0
    numbers = {"length": float(len(array)), "dim": float(array.shape[-1]), "spread": spread}
    return Measurement(_digest(array.shape, np.ascontiguousarray(array)), numbers)


def _digest(shape: tuple[int, ...], content: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
    digest.update(content.data if content.size else b"")
    return digest.digest()


@dataclass
class Values:
    """The measured values of one modality; all arrays are aligned with `rows`."""

    name: str
    kind: str
    rows: NDArray[np.int64]  # of the table, of the values that could be decoded
    digests: NDArray[np.void]  # hash of the decoded content
    numbers: dict[str, NDArray[np.float64]]  # words, seconds, width, ...
    prints: NDArray[Any] | None  # fingerprints (N, D); None if there are none
    texts: list[str]  # of text only
    errors: dict[int, str] = field(default_factory=dict)  # row -> why it cannot be decoded

    @property
    def total(self) -> int:
        """The number of values, readable or not."""
        return len(self.rows) + len(self.errors)


@dataclass
class ScannedData:
    """A data set with the measurements of its values; what each check reads."""

    dataset: PairedDataset
    refusals: Sequence[Refusal]
    values: Mapping[str, Values]
    files_are_listed: bool  # whether every media file of the folder should be a sample's
    manifest: str = ""  # the file with the table, if there is one

    def __post_init__(self) -> None:
        table = self.dataset.table
        self.ids: list[str] = table["id"].to_pylist()
        self.splits = np.array([str(x) if x else "" for x in table["split"].to_pylist()], object)
        labels = table["target"].to_pylist() if "target" in table.column_names else []
        self.labels = np.array(labels or [None] * len(table), object)
        self.rows: NDArray[np.int64] = self.dataset.rows.numpy()

    def row_number(self, row: int) -> int:
        """Return the number by which messages name a row of the table."""
        return self._row_numbers[row]

    @cached_property
    def _row_numbers(self) -> list[int]:
        numbers = self.dataset.provenance.row_numbers or RowNumbers()
        return numbers.numbers(range(len(self.dataset.table)))

    @property
    def split_names(self) -> list[str]:
        """The splits: train, val and test first; rows without a split have none."""
        names = {x for x in self.splits[self.rows] if x}
        order = ("train", "val", "test")
        return [*(x for x in order if x in names), *sorted(names - {*order})]

    @property
    def classes(self) -> list[str]:
        """The classes, by falling size; none where labels are numbers or lists of labels."""
        labels = [str(x) for x in self.labels[self.rows] if x is not None]
        names, counts = np.unique(np.array(labels, object).astype(str), return_counts=True)
        if not len(names) or _are_numbers(names, len(labels)) or any(";" in x for x in names):
            return []
        return [str(name) for name in names[np.argsort(-counts, kind="stable")]]


def _are_numbers(names: NDArray[np.str_], num_labels: int) -> bool:
    """Return whether labels are numbers to predict: some have decimals, or most occur once."""
    try:
        numbers = names.astype(float)
    except ValueError:
        return False
    return bool((numbers % 1 != 0).any()) or len(names) > max(20, num_labels / 3)


def scan_values(dataset: PairedDataset, *, progress: bool = True) -> dict[str, Values]:
    """Decode and measure every value of the samples; show a progress bar with rate and ETA."""
    present = dataset.present.numpy()
    rows = dataset.rows.numpy()
    bar = progress_bar(total=int(present.sum()), unit="value", disable=not progress)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return {
            name: _scan_modality(dataset, name, rows[present[:, column]], pool, bar.update)
            for column, name in enumerate(dataset.modalities)
        }


def _scan_modality(
    dataset: PairedDataset,
    name: str,
    rows: NDArray[np.int64],
    pool: ThreadPoolExecutor,
    advance: Callable[[int], Any],
) -> Values:
    kind = dataset.modalities[name]

    def read(row: int) -> Measurement | str:
        try:
            return measure(kind, dataset.decode(name, dataset.reference(name, row)))
        except FusionZooError as error:
            return str(error)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {one_line(error)}"

    measured: dict[int, Measurement] = {}  # by row
    errors: dict[int, str] = {}
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK].tolist()
        # Threads help where a decoder releases the lock; text is measured by Python itself.
        results = map(read, chunk) if kind == "text" else pool.map(read, chunk)
        for row, result in zip(chunk, results, strict=True):
            if isinstance(result, str):
                errors[row] = result
            else:
                measured[row] = result
            advance(1)
    values = list(measured.values())
    prints = [x.print for x in values if x.print is not None]
    return Values(
        name=name,
        kind=kind,
        rows=np.array(list(measured), np.int64),
        digests=np.array([x.digest for x in values], "V16"),
        numbers={
            key: np.array([x.numbers[key] for x in values])
            for key in (values[0].numbers if values else ())
        },
        prints=np.stack(prints) if prints else None,
        texts=[x.text for x in values] if kind == "text" else [],
        errors=errors,
    )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of fault in one modality or column, with all samples that have it."""

    check: str
    severity: Severity
    message: str
    advice: str
    modality: str = ""
    # Rows of the table that belong together: single samples, or samples with the same content.
    groups: tuple[tuple[int, ...], ...] = ()
    details: Mapping[int, str] = field(default_factory=dict)  # row -> more about it
    files: tuple[str, ...] = ()  # where the fault is of files rather than samples

    @property
    def title(self) -> str:
        """The name of the check in words."""
        return self.check.replace("_", " ")

    @property
    def rows(self) -> list[int]:
        """All rows, in order."""
        return sorted({row for group in self.groups for row in group})


@dataclass(frozen=True)
class ClassTable:
    """Samples by class and split, and missing values, whatever is wrong with the data."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The result of an audit."""

    scan: ScannedData
    findings: Sequence[Finding]
    classes: ClassTable
    seconds: float

    @property
    def fit(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def place(self, row: int) -> dict[str, Any]:
        """Return row number, id and split of a sample."""
        table = self.scan.dataset.table
        place = {name: table[name][row].as_py() for name in ("id", "split")}
        return {"row": self.scan.row_number(row), **place}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with every row of every finding."""
        dataset = self.scan.dataset
        return {
            "source": dataset.source,
            "samples": len(dataset),
            "splits": {str(name): count for name, count in dataset.splits.items()},
            "modalities": dataset.modalities,
            "fit": self.fit,
            "findings": [self._finding_dict(finding) for finding in self.findings],
            "classes": asdict(self.classes),
            "seconds": round(self.seconds, 3),
        }

    def _finding_dict(self, finding: Finding) -> dict[str, Any]:
        groups = [
            [{**self.place(row), "detail": finding.details.get(row, "")} for row in group]
            for group in finding.groups
        ]
        names = ("check", "severity", "modality", "message", "advice")
        facts = {name: getattr(finding, name) for name in names} | {"samples": len(finding.rows)}
        return {**facts, "groups": groups, "files": list(finding.files)}


# A function that yields a finding for each kind of fault in each modality.
Check = Callable[[ScannedData], Iterable[Finding]]


def by_share(count: int, total: int) -> Severity:
    """Return `error` if more than 5 % of the values have a fault, else `warning`."""
    return "error" if count > TOLERATED * total else "warning"


def singles(rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return rows as groups of one sample each."""
    return tuple((int(row),) for row in rows)


def counted(count: int, noun: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "sample"), counted(1234, "sample")
    ('1 sample', '1,234 samples')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
