"""Hostile cases whose values are compared: tars, spreadsheets, caches, pickles, runs.

Each opens as a user does and compares what it got with what was written: another value, or no
error where the data behind a run changed, is a fault, as is any exception but a `FusionZooError`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.features.cache import FeatureCache
from fusionzoo.features.encode import StoredFeatures
from fusionzoo.tools.convert.pickles import convert_pickle

from .cases import SHEET, XMLNS, workbook

SAMPLES = 12
DESCRIPTION = {"encoder": "planted"}


class Family(NamedTuple):
    """A case: what opens it, given an empty folder."""

    format: str
    name: str
    open: Callable[[Path], Any]


def families() -> Iterator[Family]:
    """Yield all cases."""
    yield from _tars()
    yield from _spreadsheets()
    yield from _pickles()
    yield from _caches()
    yield from _resumes()
    yield from _evaluations()


# ---- tars


def vector(row: int) -> np.ndarray:
    """Return the vector of a sample."""
    return np.arange(300, dtype=np.float32) + 1000 * row


def _tar(names: list[int], sparse: int | None = None) -> bytes:
    contents = io.BytesIO()
    with tarfile.open(fileobj=contents, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for row in names:
            array = io.BytesIO()
            np.save(array, vector(row))
            for suffix, data in (("npy", array.getvalue()), ("cls", b"%d" % (row % 2))):
                member = tarfile.TarInfo(f"{row:04d}.{suffix}")
                if row == sparse and suffix == "npy":  # one piece, told of in front of the data
                    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
                    headers |= {"GNU.sparse.name": member.name}
                    headers |= {"GNU.sparse.realsize": str(len(data))}
                    member.pax_headers = headers
                    data = b"1\n0\n%d\n" % len(data) + bytes(512)
                    data = data[:512] + array.getvalue()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return contents.getvalue()


def _open_tar(data: bytes, refused: bool) -> Callable[[Path], Any]:
    def work(root: Path) -> Any:
        (root / "train-000000.tar").write_bytes(data)
        dataset = fusionzoo.create_dataset(str(root))
        for row in range(len(dataset)):
            sample = dataset[row]
            assert sample is not None
            (name,) = (x for x in sample.values if x != "text")
            expected = vector(int(sample.id.rpartition("/")[2]))
            assert np.array_equal(np.asarray(sample.values[name]), expected), f"row {row} is wrong"
        assert not refused, f"opened silently, {len(dataset)} samples"

    return work


def _tars() -> Iterator[Family]:
    whole = _tar([*range(SAMPLES)])
    yield Family("tar", "whole", _open_tar(whole, refused=False))
    for row in (0, SAMPLES - 1):
        data = _tar([*range(SAMPLES)], sparse=row)
        yield Family("tar", f"sparse member {row}", _open_tar(data, refused=True))
    end = len(whole.rstrip(b"\0")) // 512 * 512
    for cut in range(512, end, 2560):  # multiples of 512, on and between headers
        yield Family("tar", f"cut at {cut}", _open_tar(whole[:cut], refused=True))
    for name, rows in {"later": [0, 1, 2, 0], "at once": [0, 0, 1, 2]}.items():
        yield Family("tar", f"a member twice, {name}", _open_tar(_tar(rows), refused=True))
    # Bytes behind the end are warned of; what is read must be right.
    joined = whole + _tar([*range(SAMPLES, 2 * SAMPLES)])
    yield Family("tar", "two, joined", _open_tar(joined, refused=False))


# ---- spreadsheets

HEADER = '<row r="1"><c r="A1" t="str"><v>id</v></c><c r="B1" t="str"><v>text</v></c></row>'


def _cell(place: str, value: object, kind: str = "str", style: int = 0, formula: str = "") -> str:
    formula = formula and f"<f>{formula}</f>"
    return f'<c r="{place}" t="{kind}" s="{style}">{formula}<v>{value}</v></c>'


def _row(number: int, *cells: str) -> str:
    return f'<row r="{number}">{"".join(cells)}</row>'


def _sheet(rows: str, after: str = "", epoch_1904: bool = False) -> bytes:
    """Return an .xlsx file whose sheet has a header and these rows; style 1 is of dates."""
    xml = f'<worksheet xmlns="{XMLNS}"><sheetData>{HEADER}{rows}</sheetData>{after}</worksheet>'
    dates = b'<xf numFmtId="14" fontId="0" fillId="0" borderId="0" xfId="0"/></cellXfs>'
    change = {"xl/styles.xml": lambda x: x.replace(b"</cellXfs>", dates)}
    if epoch_1904:
        change["xl/workbook.xml"] = lambda x: x.replace(
            b"<workbookPr ", b'<workbookPr date1904="1" '
        )
    return workbook({SHEET: xml.encode()}, change)


def _open_sheet(
    data: bytes, expected: dict[str, str | None] | None, name: str = "a.xlsx"
) -> Callable[[Path], Any]:
    """Compare the texts by id; None: the file must be refused."""

    def work(root: Path) -> Any:
        (root / name).write_bytes(data)
        settings: dict[str, Any] = {"shares": (1, 0, 0), "drop_empty": True}
        dataset = fusionzoo.create_dataset("manifest", root=str(root / name), **settings)
        texts = dict(zip(dataset.ids, dataset.references("text"), strict=True))
        assert expected is not None, f"opened silently: {str(texts)[:200]}"
        assert texts == expected, f"read {str(texts)[:200]}"

    return work


def _spreadsheets() -> Iterator[Family]:
    first, ids = _row(2, _cell("A2", "a"), _cell("B2", "x")), ("a", "b", "c", "d")
    for name, cell, text in (
        ("the text of a formula", _cell("B3", "xy", formula="CONCAT(B2,&quot;y&quot;)"), "xy"),
        ("the number of a formula", _cell("B3", "2", "n", formula="1+1"), "2"),
        ("a formula that is true", _cell("B3", "1", "b", formula="1=1"), "True"),
        ("a formula that fails", _cell("B3", "#DIV/0!", "e", formula="1/0"), None),
        ("a date", _cell("B3", "46000", "n", 1), "2025-12-09"),
        ("a date with a time", _cell("B3", "46000.5", "n", 1), "2025-12-09T12:00:00"),
        ("a date in ISO 8601", _cell("B3", "2025-12-09T12:00:00", "d"), "2025-12-09T12:00:00"),
        ("a date of the year 10^9", _cell("B3", "1e300", "n", 1), None),
        ("a number of 20 digits", _cell("B3", "12345678901234567890", "n"), "12345678901234567890"),
        ("a small number", _cell("B3", "1E-7", "n"), "1e-07"),
    ):
        expected: dict[str, str | None] = {"a": "x", "b": text}
        if text is None:  # the row has no modality: it is left out, and that is said
            del expected["b"]
        data = _sheet(first + _row(3, _cell("A3", "b"), cell))
        yield Family("xlsx", name, _open_sheet(data, expected))
    data = _sheet(first + _row(3, _cell("A3", "b"), _cell("B3", "1", "n", 1)), epoch_1904=True)
    yield Family("xlsx", "dates from 1904 on", _open_sheet(data, {"a": "x", "b": "1904-01-02"}))
    data = _sheet(first + '<row r="5"><c r="A5" t="inlineStr"/><c r="B5"/></row>' + _row(7, "<c/>"))
    yield Family("xlsx", "empty cells below", _open_sheet(data, {"a": "x"}))
    rows = {key: _row(n, _cell(f"A{n}", key), _cell(f"B{n}", key)) for n, key in enumerate(ids, 2)}
    whole: dict[str, str | None] = {key: key for key in ids}
    yield Family("xlsx", "four rows", _open_sheet(_sheet("".join(rows.values())), whole))
    formula = first + _row(3, _cell("A3", "b"), '<c r="B3"><f>1+1</f></c>')
    array = first + _row(3, _cell("A3", "b"), '<c r="B3"><f t="array" ref="B3:B4">{1,2}</f></c>')
    merged = '<mergeCells count="1"><mergeCell ref="{}"/></mergeCells>'
    table = "".join(rows.values())
    empty_below = first + _row(3, _cell("A3", "b")) + _row(4, _cell("A4", "c"))
    for name, data in {
        "a formula that was never computed": _sheet(formula),
        "formulas of an array, never computed": _sheet(array),
        "merged down": _sheet(empty_below, merged.format("B2:B4")),
        "merged across": _sheet(_row(2, _cell("A2", "a")) + rows["b"], merged.format("A2:B2")),
        "merged with the header": _sheet(table, merged.format("A1:A2")),
        "rows not in order": _sheet(rows["c"] + rows["a"] + rows["b"]),
        "a row twice": _sheet(rows["a"] + rows["a"] + rows["b"]),
        "cells not in order": _sheet(_row(2, _cell("B2", "x"), _cell("A2", "a"))),
        "a cell twice": _sheet(_row(2, _cell("A2", "a"), _cell("B2", "x"), _cell("B2", "y"))),
        "a cell of another row": _sheet(_row(2, _cell("A2", "a"), _cell("B9", "x"))),
        "a row of 5 million empty cells": _sheet(first + _row(3, "<c/>" * 5_000_000)),
        "a row of 80 million empty cells": _sheet(first + _row(3, "<c/>" * 80_000_000)),
        "a text of 40 million pieces": _sheet(
            _row(2, '<c t="inlineStr"><is>' + "<r/>" * 40_000_000 + "</is></c>")
        ),
        "20 million merged ranges": _sheet(
            first, f"<mergeCells>{'<mergeCell/>' * 20_000_000}</mergeCells>"
        ),
        "too many bits in a flag": _sheet(_row(2, _cell("A2", "a"), _cell("B2", "yes", "b"))),
        "a part twice": _twice(_sheet(first)),
        "cut": _sheet(table)[:-300],
        "a flipped bit in the sheet": _flipped_part(_sheet(table)),
        "a password": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(5000),
        "an empty zip": b"PK\x05\x06" + bytes(18),
        "CSV": b"id,text\na,x\n",
        "an OpenDocument": _open_document(),
    }.items():
        yield Family("xlsx", name, _open_sheet(data, None))
    for name, ranges in {
        "a title merged across the header": "B1:D1",
        "cells merged beyond the table": "B3:F3",
        "merged below the table": "A6:B9",
    }.items():
        data = _sheet(table, merged.format(ranges))
        yield Family("xlsx", name, _open_sheet(data, whole))
    for format in ("csv", "tsv", "jsonl", "parquet"):
        name = f"a workbook that is called .{format}"
        yield Family("xlsx", name, _open_sheet(_sheet(table), None, f"a.{format}"))
    for format in ("ods", "xls", "xlsb"):
        contents = _open_document() if format == "ods" else _sheet(table)
        yield Family(format, "whole", _open_sheet(contents, None, f"a.{format}"))


def _twice(data: bytes) -> bytes:
    contents = io.BytesIO(data)
    with warnings.catch_warnings(), zipfile.ZipFile(contents, "a") as book:
        warnings.simplefilter("ignore")
        book.writestr(SHEET, book.read(SHEET).replace(b"<v>x</v>", b"<v>y</v>"))
    return contents.getvalue()


def _flipped_part(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as book:
        part = book.getinfo(SHEET)
    damaged = bytearray(data)
    damaged[part.header_offset + 30 + len(SHEET) + part.compress_size // 2] ^= 16
    return bytes(damaged)


def _open_document() -> bytes:
    contents = io.BytesIO()
    with zipfile.ZipFile(contents, "w") as book:
        book.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        book.writestr("content.xml", "<office:document-content/>")
    return contents.getvalue()


# ---- pickles


def _pickles() -> Iterator[Family]:
    huge = b"\x80\x04" + b"\x8a\xff" + b"\x7f" * 255 + b"."
    nested = b"\x80\x02" + b"]" + b"(" * 40 + b"l" * 40 + b"."
    for name, data in {
        "12 bytes that ask for 3.6 GB": b"\x80\x04\x8e" + (3_600_000_000).to_bytes(8, "little"),
        "bytearray of 3.6 GB": b"\x80\x05\x96" + (3_600_000_000).to_bytes(8, "little"),
        "a memo of 2^31": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "4,000 digits": pickle.dumps({"train": {"text": 10**4000}}),
        "digits as text": b"I" + b"9" * 5000 + b"\n.",
        "a long of 255 bytes": huge,
        "lists that double": b"\x80\x02]q\0" + b"(h\0h\0eh\0" * 40 + b".",
        "nested": nested,
        "tuples that double": b"\x80\x02)" + b"2\x86" * 60 + b".",
        "nothing": b"",
        "cut": pickle.dumps({"train": {"id": ["a"] * 50}})[:60],
        "a command": b"cos\nsystem\n(S'true'\ntR.",
    }.items():
        yield Family("pickle", name, _open_pickle(data))


def _open_pickle(data: bytes) -> Callable[[Path], Any]:
    def work(root: Path) -> Any:
        (root / "a.pkl").write_bytes(data)
        convert_pickle(root / "a.pkl", root / "out")
        raise AssertionError("converted silently")

    return work


# ---- the feature cache


def _stored() -> StoredFeatures:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 2, 4, generator=draw)
    return StoredFeatures(tokens, torch.ones(8, 2, dtype=torch.bool), tokens.mean(1))


def _damage(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def work(root: Path) -> Any:
        cache = FeatureCache(root / "features")
        whole = _stored()
        cache.save(DESCRIPTION, whole)
        (entry,) = (path.parent for path in cache.root.glob("*/about.json"))
        change(entry)
        list(cache.entries())
        cache.prune(keep_days=100)
        again = cache.get(DESCRIPTION, lambda _: _stored())
        for ours, expected in zip(again, whole, strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(expected)), "wrong values"

    return work


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


def _caches() -> Iterator[Family]:
    about = "about.json"
    for name, change in {
        "about.json is empty": lambda x: (x / about).write_text(""),
        "about.json is a list": lambda x: (x / about).write_text("[]"),
        "about.json lacks a key": lambda x: (x / about).write_text("{}"),
        "about.json is a folder": lambda x: ((x / about).unlink(), (x / about).mkdir()),
        "about.json is binary": lambda x: (x / about).write_bytes(b"\xff\xfe"),
        "a flipped bit": lambda x: _flip(max(x.glob("*.bin"), key=lambda y: y.stat().st_size)),
        "a file is gone": lambda x: next(x.glob("*.bin")).unlink(),
        "a file is cut": lambda x: os.truncate(max(x.glob("*.bin")), 3),
        "a foreign file": lambda x: (x.parent / "notes.txt").write_text("x"),
        "a foreign folder": lambda x: (x.parent / "other").mkdir(),
        "a foreign part": lambda x: (x.parent / "a.part-x").mkdir(),
        "a link to nowhere": lambda x: (x.parent / "lost").symlink_to("nowhere"),
        "a folder within": lambda x: (x / "deeper").mkdir(),
    }.items():
        yield Family("cache", name, _damage(change))


# ---- resumes and evaluations


def _table(path: Path, change: Callable[[list[dict[str, Any]]], Any] = lambda _: None) -> Path:
    """Write 90 texts of three classes, with a group of three rows each."""
    splits = ["train", "train", "train", "val", "test"]
    rows = [
        {"id": f"r{i}", "split": splits[i % 5], "target": "abc"[i % 3], "text": f"word {i % 3} {i}"}
        for i in range(90)
    ]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _command(name: str, *words: str) -> None:
    from fusionzoo.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([name, *words])
    lines = said.getvalue().strip().splitlines()
    assert "Traceback" not in said.getvalue()
    if code:
        raise FusionZooError(lines[-1] if lines else f"exit code {code}")


def _train(root: Path, *more: str) -> None:
    flags = ["--data.name", "manifest", "--data.root", str(root / "data.jsonl"), "--log", "none"]
    flags += ["--encoders.text.name", "chars", "--encoders.text.dim", "8", "--train.epochs", "1"]
    _command("train", *flags, "--out", str(root / "run"), *more)


def _edit(key: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda rows: [row.update({key: edit(row)}) for row in rows]


def _resumes() -> Iterator[Family]:
    swap = {"train": "test", "test": "train", "val": "val"}
    for name, change in {
        "classes renamed": _edit("target", lambda row: "xyz"["abc".index(row["target"])]),
        "labels rotated": _edit("target", lambda row: "bca"["abc".index(row["target"])]),
        "train and test swapped": _edit("split", lambda row: swap[row["split"]]),
        "ids renamed": _edit("id", lambda row: f"new {row['id']}"),
        "half of the rows gone": lambda rows: rows.__delitem__(slice(0, None, 2)),
        "a fourth class": _edit("target", lambda row: "d" if row["id"] == "r0" else row["target"]),
    }.items():
        yield Family("resume", name, _resume(change, refused=True))
    yield Family("resume", "nothing changed", _resume(lambda _: None, refused=False))


def _resume(change: Callable[[list[dict[str, Any]]], Any], refused: bool) -> Callable[[Path], Any]:
    def work(root: Path) -> Any:
        _table(root / "data.jsonl")
        _train(root)
        _table(root / "data.jsonl", change)
        _command("train", "--resume", "--out", str(root / "run"), "--train.epochs", "2")
        assert not refused, "resumed on other data without a word"

    return work


def _evaluations() -> Iterator[Family]:
    yield Family("evaluation", "the test split", _evaluate(lambda _: None, overlap=False))
    swap = _edit("split", lambda row: {"train": "test", "test": "train"}.get(row["split"], "val"))
    yield Family("evaluation", "rows it was trained on", _evaluate(swap, overlap=True))


def _evaluate(
    change: Callable[[list[dict[str, Any]]], Any], overlap: bool
) -> Callable[[Path], Any]:
    def work(root: Path) -> Any:
        _table(root / "data.jsonl")
        _train(root)
        _table(root / "data.jsonl", change)
        out = root / "metrics.json"
        words = ["--model", str(root / "run"), "--data.name", "manifest", "--out", str(out)]
        _command("evaluate", *words, "--data.root", str(root / "data.jsonl"))
        seen = sum(json.loads(out.read_text())["seen_in_training"].values())
        assert (seen > 0) == overlap, f"metrics.json counts {seen} rows that the model has seen"

    return work
