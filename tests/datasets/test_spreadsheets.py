"""Tables as users have them: files, rows by number, cells, splits, joins and labels."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo import PairedDataset, create_dataset
from fusionzoo.datasets import split_by_hash
from fusionzoo.datasets.media.budgets import BUDGETS
from fusionzoo.datasets.opening import complete
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.infer import objective_hint
from fusionzoo.datasets.sources.text_tables import find_delimiter
from fusionzoo.datasets.summary import data_summary
from fusionzoo.datasets.tables.splits import SHARES, make_splits
from fusionzoo.errors import FusionZooError
from helpers.memory import at_most

HEADER = ["id", "split", "target", "text"]
ROWS = [
    ["007", "train", "Käse", "größer, als ; gedacht | wirklich"],
    ["b", "val", "Käse", "zwei\nZeilen"],
    ["c", "test", "Käse", 'ein "Zitat"'],
]


def cells(delimiter: str = ",", rows: Any = ROWS, header: Any = HEADER, ends: str = "\n") -> str:
    quoted = [['"' + str(cell).replace('"', '""') + '"' for cell in row] for row in rows]
    return "".join(delimiter.join(row) + ends for row in [header, *quoted])


def opened(path: Path, **settings: Any) -> PairedDataset:
    return create_dataset("manifest", root=str(path), **settings)


def table(folder: Path, text: str, name: str = "m.csv", **settings: Any) -> PairedDataset:
    (folder / name).write_bytes(text.encode())
    return opened(folder / name, **settings)


def summary(data: PairedDataset) -> dict[str, str]:
    return {line[:10].strip(): line[10:] for line in data_summary(data)}


def message(*args: Any, **settings: Any) -> str:
    with pytest.raises(FusionZooError) as caught:
        table(*args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_rows(data: PairedDataset) -> None:
    assert data.ids == ["007", "b", "c"]
    assert data.split_names == ["train", "val", "test"]
    assert data.classes == ["Käse"]
    assert data.references("text") == [row[3] for row in ROWS]


# ---- files


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1"]
)
@pytest.mark.parametrize("compressed", [False, True])
def test_delimiter_and_encoding_are_found(
    delimiter: str, encoding: str, compressed: bool, tmp_path: Path
) -> None:
    data = cells(delimiter).encode(encoding)
    path = tmp_path / ("m.CSV.gz" if compressed else "m.csv")
    path.write_bytes(gzip.compress(data) if compressed else data)
    dataset = opened(path)
    check_rows(dataset)
    said = summary(dataset).get("read as", "")
    names = {",": "", "\t": "delimiter tab"}
    assert names.get(delimiter, f"delimiter '{delimiter}'") in said
    guesses = {"latin-1": "cp1252", "cp1252": "cp1252", "utf-16": "utf-16"}
    by_zeros = {x: f"encoding {x} (by its zero bytes)" for x in ("utf-16-le", "utf-16-be")}
    guessed = (guesses | by_zeros).get(encoding, "")
    assert guessed in said
    assert ("guessed" in said) == (guessed == "cp1252")
    if not guessed and delimiter == ",":
        assert said == ""


def test_delimiter_and_encoding_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(cells("#").encode("cp1251", errors="replace"))
    data = opened(path, delimiter="#", encoding="cp1251")
    assert summary(data)["read as"] == "delimiter '#', encoding cp1251 (--data.encoding)"
    path.write_text(cells("\t"))
    for name in ("tab", "\t", "\\t"):
        check_rows(opened(path, delimiter=name))
    path.write_bytes(cells().encode("cp1252"))
    check_rows(opened(path, encoding="latin-1"))
    for setting in ({"delimiter": ";;"}, {"encoding": "utf-9"}, {"encoding": "hex"}):
        with pytest.raises(FusionZooError, match=f"{next(iter(setting))}=.* is no"):
            opened(path, **setting)


@pytest.mark.parametrize(
    ("head", "delimiter"),
    [
        ("id;text\n1;a, b\n2;c, d, e\n", ";"),
        ("id,text\n1,a; b\n2,c; d\n", ","),
        ("id;x,y;z\n1;2,5;a\n2;3,5;b\n", ";"),
        ("id\ttext\n1\ta, b\n", "\t"),
        ("id,a,b\n1,2,3\n4,5,6,7\n8,9,10\n", ","),
        ("text\njust words\n", ","),
    ],
)
def test_the_delimiter_divides_every_row_like_the_header(head: str, delimiter: str) -> None:
    assert find_delimiter(head, is_whole=True) == delimiter


def test_a_first_line_for_excel_names_the_delimiter(tmp_path: Path) -> None:
    data = table(tmp_path, "sep=|\r\n" + cells("|", ends="\r\n"))
    check_rows(data)
    assert data.where(0).endswith("m.csv, row 3")
    assert data.where(2).endswith("m.csv, row 6")


@pytest.mark.parametrize("name", ["M.CSV", "m.Tsv", "m.tsv.gz", "m.JSONL", "m.ndjson.GZ"])
def test_endings_may_be_in_upper_case_and_compressed(name: str, tmp_path: Path) -> None:
    rows = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    text = "\n".join(map(json.dumps, rows)) if "json" in name.lower() else cells("\t")
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    check_rows(opened(tmp_path / name))
    assert DataSpec.of(str(tmp_path / name)).settings["name"] == "manifest"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.csv").write_text(cells())
    check_rows(create_dataset("manifest", root="~/m.csv"))
    assert DataSpec.of("~/m.csv").settings["root"] == str(tmp_path / "m.csv")


def test_broken_files_are_one_error(tmp_path: Path) -> None:
    assert "is empty" in message(tmp_path, "")
    assert "is empty" in message(tmp_path, " \n")
    assert "m.jsonl cannot be read: Empty" in message(tmp_path, "", "m.jsonl")
    assert "cannot be read" in message(tmp_path, "not compressed", "m.csv.gz")
    assert "cannot be read as .xlsx" in message(tmp_path, "no workbook", "m.xlsx")
    assert "has no rows" in message(tmp_path, "id,text\n")
    assert "below row 2 is open" in message(tmp_path, 'id,text\na,one\nb,"two\nc,three\nd,four\n')


# ---- rows by number


def test_a_bad_byte_is_named_by_row(tmp_path: Path) -> None:
    lines = ["id,text", *(f"{n},größe" for n in range(50))]
    data = "\n".join(lines).encode()
    path = tmp_path / "m.csv"
    path.write_bytes(data.replace(b"40,gr\xc3\xb6", b"40,gr\xf6"))
    with pytest.raises(FusionZooError, match=r"m\.csv, row 42: byte 0xf6 is not utf-8, as"):
        opened(path)
    assert opened(path, encoding="cp1252").references("text")[40] == "größe".replace("ß", "ÃŸ")
    path.write_bytes(b"id,text\n1,\xff\xff\xff\n")
    with pytest.raises(FusionZooError, match=r"row 2 is in cp1251: 'яяя', .* encoding=cp1251"):
        opened(path)
    path.write_bytes("id,text\n1,two\n".encode("utf-16")[:-1])
    with pytest.raises(FusionZooError, match=r"row 2: byte 0x0a is not utf-16 \(found by its byte"):
        opened(path)
    path.write_bytes("id,text\n1,é\n".encode("latin-1"))
    for encoding in ("utf-8", "ascii", "UTF8"):
        with pytest.raises(FusionZooError, match="row 2: byte 0xe9 is not"):
            opened(path, encoding=encoding)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_rows_have_the_numbers_of_an_editor(ends: str, tmp_path: Path) -> None:
    text = 'id,"te\nxt",image\na,"1\n2\n3",\n\nb,,nowhere.png\n'.replace("\n", ends)
    columns = {"words": f"te{ends}xt"}
    said = message(tmp_path, text, columns=columns, kinds={"words": "text"})
    assert "m.csv, row 7, sample 'b': image file" in said
    data = table(tmp_path, text, columns=columns, kinds={"words": "text"}, on_error="missing")
    assert [data.where(row).rpartition(" ")[2] for row in range(2)] == ["3", "7"]


def test_every_message_names_the_same_row(tmp_path: Path) -> None:
    good = "id,split,target,text,image\na,train,x,one,\n"
    for row, problem in [
        ("b,,x,two,", "split is empty"),
        (",train,x,two,", "the id is empty"),
        ("b,train,x,,", "every modality is empty"),
        ("b,test,y,two,", "has the label 'y'"),
        ("b,train,,two,", "no target"),
        ("b,train,x,two,../../x.png", "outside of"),
        ("b,train,x,two,no.png", "does not exist"),
        ("b,train,x,two", "4 cells, but the header has 5, with ',' between them"),
        ("b,train,x,two,,,", "7 cells, but"),
    ]:
        said = message(tmp_path, f"{good}\n{row}\n")
        assert "m.csv, row 4" in said
        assert problem in said
    said = message(tmp_path, good + "\nb,val,x,two,\n", targets={"target": "regression"})
    assert "m.csv, row 2, sample 'a', column 'target': 'x' is no finite number" in said


def test_a_value_that_cannot_be_decoded_has_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    data = table(tmp_path, "id,text,image\nx,one,\n\ny,two,a.png\n")
    with pytest.raises(FusionZooError, match=r"m\.csv, row 4, sample 'y', image: .*a\.png"):
        data[1]
    view = data.subset([1])
    with pytest.raises(FusionZooError, match=r"m\.csv, row 4, sample 'y'"):
        view[0]
    with pytest.raises(FusionZooError, match=r"m\.csv, row 4, sample 'y'"):
        data.select("image")[0]  # of a smaller table


def stray(cells_of_row: dict[int, dict[str, str]], unique: bool = False, ends: str = "\n") -> str:
    """A CSV of 20 rows, some cells of which are written as they stand here."""
    rows = [{"id": f"r{n}", "text": f"t {n}", "target": "ab"[n % 2]} for n in range(20)]
    for n, row in enumerate(rows):
        row |= {"target": f"c{n}"} if unique else {}
        row |= cells_of_row.get(n, {})
    return "id,text,target" + ends + "".join(",".join(row.values()) + ends for row in rows)


STRAY = {
    "rows apart": stray({3: {"text": '"Deluxe'}, 9: {"text": '24" screen'}}),
    "that ends a cell": stray({3: {"text": '"Deluxe'}, 9: {"text": 'screen 24"'}}),
    "in the next row": stray({3: {"text": '"Deluxe'}, 4: {"text": 'screen 24"'}}),
    "in the first column": stray({3: {"id": '"r3'}, 6: {"id": 'r"6'}}),
    "in the last column": stray({3: {"target": '"a'}, 6: {"target": 'b"'}}),
    "in a file of Windows": stray({3: {"text": '"Deluxe'}, 9: {"text": '24"'}}, ends="\r\n"),
    "among cells that never recur": stray({3: {"text": '"De'}, 9: {"text": '4" x'}}, unique=True),
}


@pytest.mark.parametrize("name", STRAY)
def test_rows_between_two_stray_quotation_marks_are_an_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(STRAY[name], newline="")
    with pytest.raises(FusionZooError, match=r"m.csv, row 5, column '\w+': .* rows 5 to \d+ one"):
        create_dataset(path)


@pytest.mark.parametrize(
    "cell",
    [
        "Hello, you\nBye, all",  # divides as rows do, and holds nothing of the columns
        "a, b\nI like x, y, and z\nc, d",
        "a\nb\n",
        'He said "so"\nand went, b',
    ],
)
def test_a_cell_of_several_lines_is_text(cell: str, tmp_path: Path) -> None:
    quoted = '"' + cell.replace('"', '""') + '"'
    for unique in (True, False):
        (tmp_path / "m.csv").write_text(stray({3: {"text": quoted}}, unique=unique))
        data = create_dataset(tmp_path / "m.csv", targets={})
        assert (len(data), data[3].values["text"]) == (20, cell)


def test_marks_in_other_cells_do_not_make_a_cell_of_several_lines_rows(tmp_path: Path) -> None:
    cells = {3: {"text": '"Hello, you\nBye, all"'}, 9: {"text": '"Joe" Smith'}}
    (tmp_path / "m.csv").write_text(stray(cells))
    data = create_dataset(tmp_path / "m.csv", targets={})
    assert [data[n].values["text"] for n in (3, 9)] == ["Hello, you\nBye, all", "Joe Smith"]


def test_a_table_of_many_columns_is_read_in_seconds(tmp_path: Path) -> None:
    """Looking for lost rows in 20,000 columns, as genes have, took a quarter of an hour."""
    names = ",".join(f"gene {number}" for number in range(20_000))
    rows = [f"s{row},{row % 2}" + ",0.5" * 20_000 for row in range(4)]
    (tmp_path / "genes.csv").write_text("\n".join([f"id,target,{names}", *rows]) + "\n")
    with pytest.raises(FusionZooError, match="no column of a modality"):
        create_dataset(tmp_path / "genes.csv")


def test_rows_lost_after_cells_of_several_lines_are_named(tmp_path: Path) -> None:
    before = {"text": '"two, of\nmy, words"'}
    cells = {1: before, 12: {"text": '"De'}, 15: {"text": '4" x'}}
    (tmp_path / "m.csv").write_text(stray(cells, unique=True))
    with pytest.raises(FusionZooError, match=r"m.csv, row 15, column 'text': .* rows 15 to"):
        create_dataset(tmp_path / "m.csv")


@pytest.mark.parametrize("name", ["m.csv", "m.tsv", "m.csv.gz", "m.xlsx"])
def test_a_row_that_repeats_the_header_is_an_error(name: str, tmp_path: Path) -> None:
    rows = [("id", "text"), ("id", "of a text"), ("id", "text"), ("b", "two")]
    path = tmp_path / name
    if name.endswith("xlsx"):
        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(row)
        book.save(path)
    else:
        text = "".join("\t".join(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    with pytest.raises(FusionZooError, match="row 3 repeats the header: remove it"):
        create_dataset(path)


@pytest.mark.parametrize("name", ["m.csv", "m.parquet", "m.mat"])
@pytest.mark.parametrize(
    "start", ["\ufeff\n <html lang='en'>", "version https://git-lfs", "PK\3\4"]
)
def test_a_file_that_is_no_table_is_named(name: str, start: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(start + "x" * 100)
    with pytest.raises(FusionZooError, match=f"{name} is no table, as it starts with"):
        create_dataset(tmp_path / name)


def test_the_sheets_of_a_workbook_are_listed_only_if_the_first_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = openpyxl.Workbook()
    book.active.append(["x", "y"])
    for row in range(20):
        book.active.append([row % 7, "ab"[row % 2]])
    book.create_sheet("other").append(["z"])
    book.save(tmp_path / "book.xlsx")
    spec = DataSpec(settings={"name": "manifest", "root": str(tmp_path / "book.xlsx")})
    monkeypatch.setattr(complete, "sheet_names", None)  # cannot be called
    assert "sheet" not in complete.complete(spec.settings, "y").settings


@pytest.mark.parametrize("name", ["m.xlsx", "m.ods"])
def test_a_damaged_workbook_is_named_where_its_sheets_are_searched(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("PK\3\4" + "x" * 100)
    with pytest.raises(FusionZooError, match=f"{name} cannot be read as {name[1:]}"):
        fz.train(str(tmp_path / name), target="y", out=tmp_path / "run")


def test_json_lines_that_cannot_be_read_name_row_and_column(tmp_path: Path) -> None:
    first = '{"id": "a", "text": "x"}\n\n'
    for line, problem in [
        ('{"id": "b", "text": ', "row 3 is not JSON"),
        ("[1, 2]", "row 3 is no object"),
        ('{"id": 7, "text": "x"}', "Column(/id) changed from string to number"),
        ('{"id": "b", "image": "nowhere.png"}', "m.jsonl, row 3, sample 'b': image file"),
    ]:
        assert problem in message(tmp_path, first + line + "\n", "m.jsonl")


# ---- sizes


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "m.csv.gz"])
def test_cells_may_be_larger_than_a_block(name: str, tmp_path: Path) -> None:
    long = "word " * 700_000  # 3.5 MB
    rows = [("a", "short"), ("b", long + "\nend"), ("c", "short")]
    if name == "m.jsonl":
        text = "".join(json.dumps({"id": key, "text": x}) + "\n" for key, x in rows)
    else:
        text = "id,text\n" + "".join(f'{key},"{x}"\n' for key, x in rows)
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    dataset = opened(tmp_path / name)
    assert dataset.references("text") == [x for _, x in rows]
    assert dataset.where(2).endswith("row 3" if name == "m.jsonl" else "row 5")


def test_json_lines_keep_dates_as_text(tmp_path: Path) -> None:
    rows = [{"id": "2026-01-0" + str(n), "text": f"2026-01-0{n}T10:00:00"} for n in (1, 2)]
    data = table(tmp_path, "\n".join(map(json.dumps, rows)), "m.jsonl")
    assert data.ids == ["2026-01-01", "2026-01-02"]
    assert data.references("text") == ["2026-01-01T10:00:00", "2026-01-02T10:00:00"]


# ---- spreadsheets


def workbook(path: Path, rows: Any, *, before: int = 0, sheets: Any = ()) -> Path:
    book = openpyxl.Workbook()
    sheet = book.active
    for _ in range(before):
        sheet.append([])
    for row in rows:
        sheet.append(row)
    for name in sheets:
        book.create_sheet(name).append(["id", "text"])
        book[name].append(["only", name])
    book.save(path)
    return path


def test_cells_of_a_spreadsheet_become_text(tmp_path: Path) -> None:
    import datetime

    day = datetime.datetime(2026, 11, 22)
    rows = [["id", "target", "text"], [1, 2.0, "x"], [2, 2.5, day], [3, True, "#N/A"], [4, 2, "z"]]
    path = workbook(tmp_path / "m.XLSX", rows, before=2)
    data = opened(path, shares=(1, 0, 0), drop_empty=True)
    assert (data.ids, data.labels) == (["1", "2", "4"], ["2", "2.5", "2"])
    assert data.references("text") == ["x", "2026-11-22", "z"]
    assert data.where(2).endswith("m.XLSX, row 7")
    with pytest.raises(
        FusionZooError, match=r"m\.XLSX, row 6, sample '3': every modality is empty"
    ):
        opened(path)


def test_sheets_are_chosen_by_name(tmp_path: Path) -> None:
    path = workbook(tmp_path / "m.xlsx", [["id", "text"], ["a", "x"]], sheets=["Two"])
    assert summary(opened(path))["read as"] == "sheet 'Sheet' of 2 (--data.sheet)"
    assert opened(path, sheet="Two").references("text") == ["Two"]
    with pytest.raises(FusionZooError, match=r"has no sheet 'two'.*: Sheet, Two"):
        opened(path, sheet="two")


def test_a_formula_without_a_value_is_an_error(tmp_path: Path) -> None:
    path = workbook(tmp_path / "m.xlsx", [["id", "text"], ["a", "x"], ["b", '=CONCAT("a", "b")']])
    with pytest.raises(FusionZooError, match="row 3, column 'text': a formula has no value"):
        opened(path)


# ---- cells


def write_as(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"m.{suffix}"
    if suffix == "csv":
        lines = [rows[0].keys(), *(row.values() for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "xlsx":
        workbook(path, [list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def with_part(path: Path, name: str, before: bytes, inserted: bytes) -> Path:
    """Insert bytes into a part of a workbook."""
    workbook(path, [["id", "text"], ["a", "x"]])
    with zipfile.ZipFile(path) as book:
        parts = {part: book.read(part) for part in book.namelist()}
    assert before in parts[name]
    parts[name] = parts[name].replace(before, inserted + before)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
        for part, contents in parts.items():
            book.writestr(part, contents)
    return path


def test_cells_of_a_sheet_are_counted_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = replace(BUDGETS["cells"], limit=20 * 16_384)
    monkeypatch.setitem(BUDGETS, "cells", limit)
    cells = b"".join(
        b'<row r="%d"><c r="XFD%d"><v>1</v></c></row>' % (n, n) for n in range(3, 2000)
    )
    path = with_part(tmp_path / "m.xlsx", "xl/worksheets/sheet1.xml", b"</sheetData>", cells)
    problem = r"m\.xlsx is too large: 327,684 cells; at most"
    with at_most(20_000_000), pytest.raises(FusionZooError, match=problem):
        opened(path)  # 2,000 rows take 260 MB


def test_too_many_styles_or_empty_cells_are_refused_before_they_are_read(tmp_path: Path) -> None:
    row = b'<row r="3">' + b"<c/>" * 5_000_000 + b"</row>"  # of 5 kB in the file
    for name, before, inserted, count in (
        ("xl/styles.xml", b"</cellXfs>", b"<xf/>" * 300_000, r"300,\d+"),
        ("xl/worksheets/sheet1.xml", b"</sheetData>", row, r"26\d,\d+"),
    ):
        path = with_part(tmp_path / "m.xlsx", name, before, inserted)
        with pytest.raises(FusionZooError, match=rf"{name} is too large: {count} XML elements"):
            opened(path)


@pytest.mark.parametrize(
    ("merged", "problem"),
    [("A1:B1", ""), ("B2:D2", ""), ("B2:B8", ""), ("A2:B2", "A2:B2"), ("A1:A2", "A1:A2")],
)
def test_merged_cells_of_the_table_are_refused(merged: str, problem: str, tmp_path: Path) -> None:
    """In the file all but the first are empty: a label for three rows would be that of one."""
    cells = f'<mergeCells count="1"><mergeCell ref="{merged}"/></mergeCells>'.encode()
    path = with_part(tmp_path / "m.xlsx", "xl/worksheets/sheet1.xml", b"<pageMargins", cells)
    if not problem:
        assert opened(path).references("text") == ["x"]
        return
    with pytest.raises(FusionZooError, match=f"the cells {problem} are merged: unmerge"):
        opened(path)


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ('<row r="5"><c r="A5"><v>1</v></c></row><row r="4"><c r="A4"><v>2</v></c></row>', 4),
        ('<row r="3"><c r="A3"><v>1</v></c></row><row r="3"><c r="A3"><v>2</v></c></row>', 3),
        ('<row r="3"><c r="B3"><v>1</v></c><c r="A3"><v>2</v></c></row>', 3),
        ('<row r="3"><c r="A7"><v>1</v></c></row>', 3),
    ],
)
def test_rows_and_cells_that_openpyxl_would_leave_out_are_refused(
    rows: str, number: int, tmp_path: Path
) -> None:
    path = with_part(
        tmp_path / "m.xlsx", "xl/worksheets/sheet1.xml", b"</sheetData>", rows.encode()
    )
    with pytest.raises(FusionZooError, match=f"row {number}: rows or cells not in order"):
        opened(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_part_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = workbook(tmp_path / "m.xlsx", [["id", "text"], ["a", "x"]])
    with zipfile.ZipFile(path, "a") as book:
        book.writestr(part := "xl/worksheets/sheet1.xml", book.read(part))
    with pytest.raises(FusionZooError, match="holds a part twice: save it anew"):
        opened(path)


def test_the_error_of_a_formula_is_a_missing_value(tmp_path: Path) -> None:
    rows = [["id", "target", "text"], ["a", "k", "x"], ["b", "#DIV/0!", "y"], ["c", "k", "#REF!"]]
    path = workbook(tmp_path / "m.xlsx", rows)
    with pytest.raises(FusionZooError, match=r"row 3, sample 'b' .* has no target"):
        opened(path, shares=(1, 0, 0), drop_empty=True)
    path = workbook(tmp_path / "m.xlsx", [rows[0], rows[1], rows[3]])
    assert opened(path, shares=(1, 0, 0), drop_empty=True).ids == ["a"]


def test_a_hidden_first_sheet_is_not_read_in_silence(tmp_path: Path) -> None:
    path = workbook(tmp_path / "m.xlsx", [["id", "text"], ["a", "x"]], sheets=["Two"])
    book = openpyxl.load_workbook(path)
    name = book.worksheets[0].title
    book.worksheets[0].sheet_state = "hidden"
    book.active = 1
    book.save(path)
    with pytest.raises(FusionZooError, match=f"{name!r} is hidden: sheet= names one"):
        opened(path)
    assert opened(path, sheet=name).ids == ["a"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "xlsx"])
def test_words_for_a_missing_value_are_missing(suffix: str, tmp_path: Path) -> None:
    words = ["NA", "nan", "null", "None", "#N/A", "", "  ", "Na", "none", "words"]
    rows = [{"id": f"i{n}", "vector": "", "text": word} for n, word in enumerate(words)]
    np.save(tmp_path / "v.npy", np.zeros(2))
    rows = [{**row, "vector": "v.npy"} for row in rows]
    data = opened(write_as(tmp_path, suffix, rows))
    assert data.references("text") == [None] * 7 + ["Na", "none", "words"]
    assert summary(data)["missing"] == (
        "'NA' 1, 'nan' 1, 'null' 1, 'None' 1, '#N/A' 1 in text (--data.na)"
    )
    data = opened(tmp_path / f"m.{suffix}", na="words,none")
    assert data.references("text")[:5] == words[:5]
    assert data.references("text")[5:] == [None, None, "Na", None, None]
    assert "missing" not in summary(opened(tmp_path / f"m.{suffix}", na=""))


def test_in_parquet_words_are_missing_only_if_they_are_named(tmp_path: Path) -> None:
    rows = [{"id": word, "text": word} for word in ("NA", "null", "words")]
    path = write_as(tmp_path, "parquet", rows)
    assert opened(path).references("text") == ["NA", "null", "words"]
    assert opened(path, na="NA,null", drop_empty=True).references("text") == ["words"]


def test_missing_words_hold_for_labels_and_groups_but_not_for_ids(tmp_path: Path) -> None:
    text = "id,target,group,text\nNA,1,NA,x\nb,-999,g,y\nc,NA,g,z\n"
    kinds = {"target": "regression"}
    data = table(tmp_path, text, shares=(1, 0, 0), targets=kinds, na=["NA", -999])
    assert data.ids == ["NA", "b", "c"]
    assert data.groups == ["NA", "g", "g"]
    assert data.labels == ["1", None, None]
    assert "1 empty cells stand alone" in summary(data)["groups"]
    assert table(tmp_path, text.replace(",NA,g", ",2,g"), targets=kinds, na=-999).labels[1] is None


def test_numbers_that_are_not_a_number_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    columns = {"id": [1.0, 2.0, 3.0], "text": ["x", "y", "z"], "age": [1.5, float("nan"), 2.0]}
    pq.write_table(pa.table(columns), path)
    data = opened(path, shares=(1, 0, 0), targets={"age": "regression"}, na="")
    assert data.ids == ["1", "2", "3"]
    assert data.targets[:, 0].isnan().tolist() == [False, True, False]


def test_a_decimal_comma_is_read_or_pointed_out(tmp_path: Path) -> None:
    text = "id;age;target;text\n1;25,06;1,0;2,5 kg\n2;-3,5e1;1,0;x\n3;7;1,0;x\n"
    kinds = {"age": "regression"}
    said = message(tmp_path, text, targets=kinds, shares=(1, 0, 0))
    assert said.endswith(
        "m.csv, row 2, sample '1', column 'age': '25,06' is no finite number;"
        ' decimal="," reads it as 25.06'
    )
    data = table(tmp_path, text, targets=kinds, shares=(1, 0, 0), decimal=",")
    numbers = data.scheme[0].original(data.targets)[:, 0]
    assert numbers.tolist() == pytest.approx([25.06, -35, 7], abs=1e-5)
    assert data.references("text")[0] == "2,5 kg"  # text stays as it is
    assert summary(data)["read as"] == "delimiter ';', decimal comma"
    for cell in ("25,06", "-3.5", "7"):
        said = message(tmp_path, f"id;vector\na;{cell}\n")
        assert f"m.csv, row 2, sample 'a': vector cell {cell!r} is a number, not a path" in said
    with pytest.raises(FusionZooError, match=r"decimal=.*x.* is neither"):
        table(tmp_path, text, decimal="x")


def test_a_decimal_comma_in_a_list_is_read_or_pointed_out(tmp_path: Path) -> None:
    rows = [{"id": "a", "vector": ["25,06", "1"], "sequence": [["0,5"], ["2"]]}, {"id": "b"}]
    rows[1]["vector"] = ["1", "-2,5e1"]
    text = "\n".join(map(json.dumps, rows))
    data = table(tmp_path, text, "m.jsonl", decimal=",")
    assert data[0].values["vector"].tolist() == pytest.approx([25.06, 1], abs=1e-5)
    assert data[0].values["sequence"].tolist() == [[0.5], [2]]
    assert data[1].values["vector"].tolist() == [1, -25]
    assert data[1].values["sequence"] is None
    copy = create_dataset(**data.to_manifest(tmp_path / "copy.parquet"))  # numbers, not paths
    assert copy[0].values["vector"].tolist() == data[0].values["vector"].tolist()
    with pytest.raises(FusionZooError, match=r"row 1, .*'25,06'.*--data\.decimal , reads it as"):
        table(tmp_path, text, "m.jsonl")[0]


def test_backslashes_in_paths_are_slashes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "v.npy", np.ones(2))
    data = table(tmp_path, "id,vector,text\n1,a\\v.npy,a\\b\n")
    assert data[0].values["vector"].tolist() == [1, 1]
    assert data[0].values["text"] == "a\\b"
    assert summary(data)["read as"] == "backslashes in vector as slashes"
    assert "outside of" in message(tmp_path / "a", "id,vector\n1,..\\..\\v.npy\n")


def test_empty_rows_are_an_error_or_left_out(tmp_path: Path) -> None:
    text = "id,split,target,text\na,train,x,one\n,,,\nb,train,x,two\nc,train,x,NA\n\n,,,\n"
    said = message(tmp_path, text)
    assert "m.csv, row 3: every modality is empty, as in 3 rows" in said
    assert "drop_empty=True" in said
    data = table(tmp_path, text, drop_empty=True)
    assert data.ids == ["a", "b"]
    assert summary(data)["empty"] == "3 rows left out (--data.drop_empty)"
    assert data.where(1).endswith("m.csv, row 4")
    data = table(tmp_path, "text\none\nNA\nthree\n", drop_empty=True)
    assert data.ids == ["0", "2"]  # as if no row were dropped


def test_columns_without_a_name_are_unused(tmp_path: Path) -> None:
    data = table(tmp_path, ",id,text,,\n0,a,x,,\n1,b,y,,\n")
    assert summary(data)["unused"] == "columns '', '', ''"
    assert data.references("text") == ["x", "y"]


# ---- splits


def test_other_names_of_splits_are_mapped_and_said(tmp_path: Path) -> None:
    names = ["Train", "training", "train", "valid", "validation", "dev", "TEST", "testing", "extra"]
    text = "id,split,text\n" + "".join(f"{n},{name},x\n" for n, name in enumerate(names))
    data = table(tmp_path, text)
    assert data.splits == {"train": 3, "val": 2, "dev": 1, "test": 2, "extra": 1}
    assert "'valid' read as val, 'validation' read as val" in summary(data)["splits"]
    assert "'train'" not in summary(data)["splits"]
    data = table(tmp_path, "id,split,text\na,Train,x\nb,Dev,x\nc,TEST,x\n")
    assert data.split_names == ["train", "val", "test"]
    assert summary(data)["splits"].endswith(
        "(column 'split', 'Train' read as train, 'Dev' read as val, 'TEST' read as test)"
    )


def test_every_class_has_the_same_shares_of_the_splits(tmp_path: Path) -> None:
    ids = [f"s{n}" for n in range(300)]
    labels = ["rare" if n % 10 == 0 else "usual" for n in range(300)]
    text = "".join(f"{key},{label},x\n" for key, label in zip(ids, labels, strict=True))
    data = table(tmp_path, "id,target,text\n" + text)
    counts = Counter(zip(labels, data.split_names, strict=True))
    for label, rows in Counter(labels).items():
        for split, share in zip(("train", "val", "test"), SHARES, strict=True):
            assert abs(counts[label, split] - share * rows) <= 1
    assert summary(data)["splits"].endswith(
        "(by a hash of 'id', with the same shares of every class)"
    )


def test_numbers_to_predict_are_split_by_the_hash_alone(tmp_path: Path) -> None:
    ids = [f"s{n}" for n in range(300)]
    text = "id,price,text\n" + "".join(f"{key},{n * 1.37},x\n" for n, key in enumerate(ids))
    data = table(tmp_path, text, targets={"price": "regression"})
    assert data.split_names == [split_by_hash(key) for key in ids]
    assert summary(data)["splits"].endswith("(by a hash of 'id')")


@pytest.mark.parametrize("start", range(0, 400, 23))
def test_small_classes_are_in_every_split(start: int) -> None:
    ids = [f"{start + n}" for n in range(40)]
    labels = [f"c{n // 4}" for n in range(40)]
    made = make_splits(pa.array(ids), [pa.array(labels)])
    splits = made.splits.to_pylist()
    pairs = Counter(zip(labels, splits, strict=True))
    assert len(pairs) == 30
    assert 0 < len(made.moved) < 25
    assert made.moved.items() <= dict(zip(ids, splits, strict=True)).items()
    again = make_splits(pa.array(ids[::-1]), [pa.array(labels[::-1])])
    assert again.splits.to_pylist() == splits[::-1]  # whatever the order of the rows


def test_groups_are_spread_by_their_most_frequent_class() -> None:
    keys = [f"p{n // 5}" for n in range(1000)]
    labels = ["well" if n % 5 < 3 or n < 500 else "ill" for n in range(1000)]
    labels = ["ill" if n >= 800 else label for n, label in enumerate(labels)]
    made = make_splits(pa.array(keys), [pa.array(labels)])
    tests = {key for key, x in zip(keys, made.splits.to_pylist(), strict=True) if x == "test"}
    ill = {f"p{n}" for n in range(160, 200)}  # all of whose rows are ill; of others, most are well
    assert abs(len(tests & ill) - 0.15 * 40) <= 1
    assert abs(len(tests - ill) - 0.15 * 160) <= 1


def test_a_class_that_is_too_small_is_trained_on_and_said(tmp_path: Path) -> None:
    keys = [f"s{n}" for n in range(200)]
    rare, label = "s7", next(x for x in map(str, range(99)) if split_by_hash(x) == "test")
    text = "id,target,text\n" + "".join(f"{k},{label if k == rare else 'usual'},x\n" for k in keys)
    data = table(tmp_path, text)
    assert data.split_names[keys.index(rare)] == "train"
    assert summary(data)["splits"].endswith(
        f"(by a hash of 'id', with the same shares of every class; {rare!r} moved to train, so that"
        " every split has every class; 1 class is too small for every split)"
    )


def test_groups_stay_together_and_spread_classes() -> None:
    keys = [f"p{n // 10}" for n in range(120)]
    labels = ["ill" if n // 10 < 4 else "well" for n in range(120)]
    made = make_splits(pa.array(keys), [pa.array(labels)])
    splits = made.splits.to_pylist()
    assert len(set(zip(keys, splits, strict=True))) == 12
    assert len(set(zip(labels, splits, strict=True))) == 6


def test_labels_of_several_are_spread_too(tmp_path: Path) -> None:
    rows = "".join(
        f"s{n},{'sun; sea' if n % 13 == 0 else 'sea' if n % 2 else ';'},x\n" for n in range(60)
    )
    data = table(tmp_path, "id,tags,text\n" + rows, targets={"tags": "multilabel"})
    assert data.scheme[0].classes == ("sea", "sun")
    with_sun = {split for split, x in zip(data.split_names, data.targets[:, 1], strict=True) if x}
    assert with_sun == {"train", "val", "test"}


def test_many_classes_are_no_classes() -> None:
    keys = [f"s{n}" for n in range(100)]
    made = make_splits(pa.array(keys), [pa.array([f"c{n}" for n in range(100)])])
    assert made.splits.to_pylist() == [split_by_hash(key) for key in keys]


def test_class_folders_have_every_class_in_each_split(tmp_path: Path) -> None:
    for label in "abcdef":
        (tmp_path / label).mkdir()
        for number in range(4):
            (tmp_path / label / f"{number}.txt").write_text("words")
    data = create_dataset("folders", root=str(tmp_path))
    assert len(set(zip(data.labels, data.split_names, strict=True))) == 18


# ---- joins


def test_splits_of_a_join_are_made_of_the_joined_ids(tmp_path: Path) -> None:
    ids = [f"s{n}" for n in range(60)]
    rows = "".join(f"{key},c{n // 6},x\n" for n, key in enumerate(ids))
    left = table(tmp_path, "id,target,text\n" + rows, "left.csv")
    right = table(tmp_path, "id,text\n" + "".join(f"{key},y\n" for key in ids), "right.csv")
    assert left.split_names != right.split_names  # the classes of one are unknown to the other
    data = PairedDataset.join({"a": left, "b": right})
    assert len(set(zip(data.labels, data.split_names, strict=True))) == 30
    assert summary(data)["splits"].startswith("train ")
    assert "by a hash of the joined ids" in summary(data)["splits"]
    train = PairedDataset.join({"a": left.split("train"), "b": left.split("train")})
    assert train.splits == {"train": len(left.split("train"))}


# ---- labels


def test_spaces_around_classes_do_not_count_and_case_is_pointed_out(tmp_path: Path) -> None:
    text = "id,target,text\n" + "".join(
        f"{n},{('cat', 'cat ', 'Cat', 'dog')[n % 4]},x\n" for n in range(80)
    )
    data = table(tmp_path, text)
    assert data.classes == ["Cat", "cat", "dog"]
    assert "the classes 'Cat', 'cat' differ by case alone" in summary(data)["hint"]
    assert "hint" not in summary(table(tmp_path, text.replace("Cat", "cow")))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([f"{n / 7:.3f}" for n in range(60)], "--objective.name regression learns"),
        ([f"{n},5" for n in range(60)], "--objective.name regression --data.decimal , learns"),
        ([str(n * 37 % 101) for n in range(200)], "--objective.name regression"),
        (["sun;sea", "sun", "sea"] * 5, "--objective.name multilabel"),
        (["sun, sea", "sun", "sea"] * 5, "--objective.name multilabel --data.label_separator ,"),
        (["sun|sea", "sun", "sea"], "--objective.name multilabel --data.label_separator '|'"),
        (["one", "two", "three", "four"], "each of the 4 targets occurs once"),
        ([str(n % 10) for n in range(100)], ""),
        ([str(n % 30) for n in range(1000)], ""),
        (["Paris, France", "Rome, Italy"] * 5, ""),
        (["cat", "dog"] * 5, ""),
        ([None, None], ""),
    ],
)
def test_a_hint_names_the_objective_that_fits(labels: list[Any], expected: str) -> None:
    hint = objective_hint(pa.array(labels, pa.string()))
    assert expected in hint
    assert bool(expected) == bool(hint)


def test_lists_in_cells_of_text_are_vectors_and_sequences(tmp_path: Path) -> None:
    rows = ['a,"[1, 2.5]","[[1, 2], [3, 4]]"', 'b,"[3,-4e1] ",', "c,,"]
    data = table(tmp_path, "id,vector,sequence\n" + "\n".join(rows), drop_empty=True)
    assert [x.values["vector"].tolist() for x in (data[0], data[1])] == [[1, 2.5], [3, -40]]
    assert data[0].values["sequence"].tolist() == [[1, 2], [3, 4]]
    assert data[1].values["sequence"] is None
    assert "text in vector as lists of numbers" in summary(data)["read as"]


@pytest.mark.parametrize(
    "cell",
    ["[1. 2.]", "[[1, 2]]", "1", "[true]", '[""a""]', f"[1{'0' * 400}]", "[" * 2000 + "]" * 2000],
)
def test_a_cell_that_is_no_list_of_numbers_is_named(tmp_path: Path, cell: str) -> None:
    said = message(tmp_path, f'id,vector\na,"[1, 2]"\nb,"{cell}"\n')
    assert "m.csv, row 3, column 'vector': " in said
    assert "is no list of numbers such as [0.5, 1, 2]" in said


def test_labels_are_separated_as_the_user_says(tmp_path: Path) -> None:
    rows = "".join(f's{n},"{("sun, sea", "sun", "sea", "")[n % 4]}",x\n' for n in range(80))
    text, kinds = "id,tags,text\n" + rows, {"tags": "multilabel"}
    data = table(tmp_path, text, targets=kinds)
    assert data.scheme[0].classes == ("sea", "sun", "sun, sea")
    assert "--data.label_separator ," in summary(data)["hint"]
    data = table(tmp_path, text, targets=kinds, label_separator=",")
    assert data.scheme[0].classes == ("sea", "sun")
    assert data.targets[:3].tolist() == [[1, 1], [0, 1], [1, 0]]
    assert data.targets[3].isnan().all()
    said = message(
        tmp_path, text.replace("sun, sea", "sun; sea"), targets=kinds, label_separator=","
    )
    assert "m.csv, row 2: the labels 'sun; sea' contain ';'" in said
    lists = '{"id": "a", "text": "x", "tags": ["sun", "sea"]}\n'
    data = table(tmp_path, lists, "m.jsonl", targets=kinds, label_separator=",", shares=(1, 0, 0))
    assert data.targets.tolist() == [[1, 1]]


def test_ids_splits_groups_and_labels_as_bytes_are_text() -> None:
    columns = {
        "id": ["a", "b"],
        "split": ["train", "test"],
        "target": ["x", "x"],
        "group": ["p", "q"],
    }
    cells = {name: [cell.encode() for cell in column] for name, column in columns.items()}
    data = create_dataset(pa.table({**cells, "text": ["one", "two"]}))
    found = (data.ids, data.split_names, data.labels, data.groups)
    assert found == tuple(columns.values())


@pytest.mark.parametrize("last", [20_004, 1_048_576])
def test_a_cell_far_below_the_table_is_an_error_that_names_its_row(
    last: int, tmp_path: Path
) -> None:
    path = workbook(tmp_path / "m.xlsx", [["id", "text"], ["a", "one"], ["b", "two"]])
    book = openpyxl.load_workbook(path)
    book.active.cell(last, 5).value = None  # formatted, but empty
    book.active.cell(last, 5).font = openpyxl.styles.Font(bold=True)
    book.save(path)
    assert len(create_dataset("manifest", root=str(path))) == 2
    book.active.cell(last, 5).value = "stray"
    book.save(path)
    with pytest.raises(FusionZooError) as caught:
        create_dataset("manifest", root=str(path))
    assert f"empty rows before row {last:,}: delete it" in str(caught.value)


def test_a_gap_of_empty_rows_keeps_the_numbers_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "m.xlsx"
    book = openpyxl.Workbook()
    book.active.append(["id", "text"])
    book.active.cell(9_000, 1).value, book.active.cell(9_000, 2).value = "a", "one"
    book.save(path)
    data = create_dataset("manifest", root=str(path), drop_empty=True)
    assert (data.ids, data.where(0)) == (["a"], f"{path}, row 9000")
