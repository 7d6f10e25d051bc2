"""Values and data sets in .npy, .npz, HDF5 and .mat files: paired, inside of the root, bounded."""

from __future__ import annotations

import csv
import os
import pickle
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.io import savemat

import fusionzoo as fz
from fusionzoo import PairedDataset, create_dataset
from fusionzoo.cli import main
from fusionzoo.datasets.media import arrays
from fusionzoo.datasets.media.arrays import open_array
from fusionzoo.datasets.media.budgets import BUDGETS, Budget
from fusionzoo.datasets.media.decode import decode
from fusionzoo.datasets.opening.complete import complete
from fusionzoo.datasets.sources.table_files import read_table
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import fingerprint

COUNT = 6
DRAW = np.random.default_rng(0)
VECTORS = DRAW.standard_normal((COUNT, 5)).astype(np.float32)
SEQUENCES = DRAW.standard_normal((COUNT, 7, 3)).astype(np.float32)
LENGTHS = np.array([7, 1, 3, 2, 7, 5])
RAGGED = [sequence[:length] for sequence, length in zip(SEQUENCES, LENGTHS, strict=True)]
IDS = [f"s{number}" for number in range(COUNT)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder `data` with files of arrays, and one beside it."""
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "v.npy", VECTORS)
    np.save(data / "s.npy", SEQUENCES)
    np.save(data / "fortran.npy", np.asfortranarray(VECTORS.astype(">f8")))
    np.save(data / "packed.npy", np.concatenate(RAGGED))
    np.savez(data / "several.npz", v=VECTORS, s=SEQUENCES)
    np.savez_compressed(data / "small.npz", v=VECTORS, s=SEQUENCES)
    with h5py.File(data / "a.h5", "w") as file:
        file["deep/v"] = VECTORS
        file.create_dataset("deep/s", data=SEQUENCES, compression="gzip", chunks=(1, 7, 3))
        for name, value in zip(IDS, RAGGED, strict=True):
            file[f"by_id/{name}"] = value
    np.save(tmp_path / "secret.npy", VECTORS)
    return data


def manifest(folder: Path, cells: Sequence[str], column: str = "vector") -> str:
    with (folder / "m.csv").open("w", newline="") as file:
        rows = zip(IDS, "ab" * (COUNT // 2), cells, strict=True)
        csv.writer(file).writerows([("id", "target", column), *rows])
    return str(folder / "m.csv")


def values(data: PairedDataset, modality: str) -> list[Any]:
    samples = [data[row] for row in range(len(data))]
    return [sample and sample.values[modality] for sample in samples]


def assert_equal(found: Sequence[Any], expected: Sequence[np.ndarray | None]) -> None:
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert value is None
        else:
            torch.testing.assert_close(value, torch.tensor(wanted, dtype=torch.float32))


@pytest.mark.parametrize(
    "cell",
    ["v.npy[{}]", "fortran.npy[{}]", "several.npz::v[{}]", "small.npz::v[{}]", "a.h5::deep/v[{}]"],
)
def test_a_cell_names_a_row_of_an_array(cell: str, folder: Path) -> None:
    data = create_dataset("manifest", root=manifest(folder, [cell.format(n) for n in range(COUNT)]))
    assert_equal(values(data, "vector"), list(VECTORS))
    assert_equal(values(pickle.loads(pickle.dumps(data)), "vector"), list(VECTORS))
    assert data.default_encoders["vector"]["in_dim"] == 5


@pytest.mark.parametrize(
    "cells",
    [
        ["packed.npy[{start}:{stop}]"] * COUNT,
        ["a.h5::by_id/s{row}"] * COUNT,
        ["{row}.npy"] * COUNT,
        ["{row}.npz"] * COUNT,
        ["packed.npy[{start}:{stop}]", "a.h5::by_id/s{row}", "{row}.npy"] * 2,
    ],
)
def test_sequences_of_different_lengths_have_arrays_or_rows_of_their_own(
    cells: list[str], folder: Path
) -> None:
    stops = LENGTHS.cumsum().tolist()
    for row, value in enumerate(RAGGED):
        np.save(folder / f"{row}.npy", value)
        np.savez(folder / f"{row}.npz", anything=value)
    cells = [
        cell.format(row=row, start=stop - length, stop=stop)
        for row, (cell, stop, length) in enumerate(zip(cells, stops, LENGTHS, strict=True))
    ]
    data = create_dataset("manifest", root=manifest(folder, cells, "sequence"))
    assert_equal(values(data, "sequence"), RAGGED)
    assert data.lengths().isfinite().all()


def test_images_and_audio_come_from_arrays_too(folder: Path) -> None:
    pixels = DRAW.integers(0, 256, (COUNT, 4, 5, 3)).astype(np.uint8)
    waves = (1e4 * DRAW.standard_normal((COUNT, 50))).clip(-3e4, 3e4).astype(np.int16)
    np.save(folder / "i.npy", pixels)
    np.save(folder / "w.npy", waves)
    cells = [f"i.npy[{n}]" for n in range(COUNT)]
    images = values(create_dataset("manifest", root=manifest(folder, cells, "image")), "image")
    assert all(np.array_equal(x.permute(1, 2, 0), y) for x, y in zip(images, pixels, strict=True))
    root = manifest(folder, [f"w.npy[{n}]" for n in range(COUNT)], "audio")
    clips = values(create_dataset("manifest", root=root, sample_rate=8000), "audio")
    assert all(clip.rate == 8000 for clip in clips)
    assert_equal([clip.samples for clip in clips], [wave / 32768 for wave in waves])
    with pytest.raises(FusionZooError, match=r"w\.npy\[0\]: .* --data\.sample_rate"):
        _ = create_dataset("manifest", root=root)[0]


def test_lists_of_parquet_and_of_fixed_size_are_vectors_and_sequences(tmp_path: Path) -> None:
    nested = pa.array([x.tolist() for x in RAGGED], pa.list_(pa.list_(pa.float32(), 3)))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.reshape(-1)), 5)
    columns = {"id": IDS, "vector": fixed, "sequence": nested}
    columns["large"] = pa.array(VECTORS.tolist(), pa.large_list(pa.float64()))
    pq.write_table(pa.table(columns), tmp_path / "m.parquet")
    data = create_dataset("manifest", root=str(tmp_path / "m.parquet"), kinds={"large": "vector"})
    assert_equal(values(data, "vector"), list(VECTORS))
    assert_equal(values(data, "large"), list(VECTORS))
    assert_equal(values(data, "sequence"), RAGGED)


# ---- --data.arrays


def with_arrays(folder: Path, words: Any, **settings: Any) -> PairedDataset:
    root = manifest(folder, ["some text"] * COUNT, "text")
    return create_dataset("manifest", root=root, arrays={"sound": words}, **settings)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("v.npy", "vector"), ("several.npz::s", "sequence"), ("a.h5::deep/v", "vector")],
)
def test_an_array_has_a_row_per_sample_and_a_kind_by_its_shape(
    words: str, kind: str, folder: Path
) -> None:
    data = with_arrays(folder, words)
    assert data.modalities["sound"] == kind
    assert_equal(values(data, "sound"), list(VECTORS if kind == "vector" else SEQUENCES))
    about = "vector of shape (5)" if kind == "vector" else "sequence of shape (7, 3)"
    line = next(line for line in data_summary(data) if line.startswith("arrays"))
    assert line.split()[1:3] == ["sound:", kind]
    assert about in line and line.endswith("in the order of the rows")


def by_id(folder: Path, layout: str) -> str:
    """Write the sequences of all samples but s1, in another order, and one of a stranger."""
    order = [4, 0, 5, 3, 2]
    ids = [*(IDS[n] for n in order), "stranger"]
    rows = [*(RAGGED[n] for n in order), RAGGED[1]]
    padded = np.zeros((len(rows), 7, 3), np.float32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    lengths = [len(row) for row in rows]
    if layout == "named":
        np.savez(folder / "x.npz", **dict(zip(ids, rows, strict=True)))
    elif layout == "packed":
        np.savez(folder / "x.npz", features=np.concatenate(rows), ids=ids, lengths=lengths)
    elif layout == "padded":
        np.savez(folder / "x.npz", features=padded, ids=ids, lengths=lengths)
    elif layout == "group":
        with h5py.File(folder / "x.h5", "w") as file:
            for name, row in zip(ids, rows, strict=True):
                file[f"all/{name}"] = row
        return "x.h5::all"
    else:
        with h5py.File(folder / "x.h5", "w") as file:
            file["features"], file["lengths"] = padded, lengths
            file["ids"] = np.array(ids, dtype="S")
        return "x.h5"
    return "x.npz"


@pytest.mark.parametrize("layout", ["named", "packed", "padded", "group", "hdf5"])
def test_arrays_are_paired_by_id_and_a_sample_without_one_lacks_it(
    layout: str, folder: Path
) -> None:
    data = with_arrays(folder, by_id(folder, layout))
    assert data.modalities == {"sound": "sequence", "text": "text"}
    expected = [value if n != 1 else None for n, value in enumerate(RAGGED)]
    assert_equal(values(data, "sound"), expected)
    assert data.present[:, 0].tolist() == [value is not None for value in expected]
    joined = PairedDataset.join({"sound": data, "text": data.select("text")}, how="outer")
    assert_equal(values(joined, "sound"), expected)


def test_an_id_that_reads_like_a_missing_value_keeps_its_array(folder: Path) -> None:
    np.savez(folder / "na.npz", features=VECTORS, ids=["NA", *IDS[1:]])
    root = Path(manifest(folder, ["some text"] * COUNT, "text"))
    root.write_text(root.read_text().replace("s0", "NA", 1))
    data = create_dataset("manifest", root=str(root), arrays={"sound": "na.npz"})
    assert data.ids[0] == "NA"
    assert_equal(values(data, "sound"), list(VECTORS))


def test_ids_may_stand_in_a_second_array(folder: Path) -> None:
    np.save(folder / "ids.npy", np.array(IDS[::-1]))
    for words in ("v.npy,ids.npy", ["v.npy", "ids.npy"]):
        assert_equal(values(with_arrays(folder, words), "sound"), list(VECTORS[::-1]))
    np.save(folder / "few.npy", np.array(IDS[:3]))
    with pytest.raises(FusionZooError, match=r"6 values, and 3 ids"):
        with_arrays(folder, "v.npy,few.npy")


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ("five.npy", {}, r"has 5 values, not 6: add ids\.npy"),
        ("several.npz", {}, "none of its ids is in"),
        ("v.npy", {"kinds": {"sound": "sequence"}}, r"values of shape \(5,\).* not sequence"),
        ("v.npy", {"kinds": {"sound": "audio"}}, r"sample_rate=16000"),
        ("../secret.npy", {}, "outside of"),
        ("none.npy", {}, r"none\.npy does not exist"),
        ("four.npy", {}, r"values of shape \(2, 2, 2\)"),
        ("objects.npy", {}, "objects.npy holds values of type object, which are never loaded"),
    ],
)
def test_arrays_that_do_not_fit_are_one_clear_error(
    words: str, settings: dict[str, Any], message: str, folder: Path
) -> None:
    np.save(folder / "five.npy", VECTORS[:5])
    np.save(folder / "four.npy", np.zeros((COUNT, 2, 2, 2)))
    np.save(folder / "objects.npy", np.array([{}] * COUNT), allow_pickle=True)
    with pytest.raises(FusionZooError, match=message) as caught:
        with_arrays(folder, words, **settings)
    assert "\n" not in str(caught.value)
    assert "sound" in str(caught.value) or "m.csv" in str(caught.value)


# ---- what is refused


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("v.npy[4:9]", r"out of range: the shape is \(6, 5\)"),
        ("v.npy::key[1]", "holds a single array"),
        ("several.npz::w[1]", r"holds no array 'w'\. .*It holds: v, s"),
        ("a.h5::deep[1]", "is a group of"),
        ("s.npy[1]", "expected 1 dimensions"),
        ("../secret.npz::a/v.npy[1]", "outside of"),
        ("link.npy[1]", "outside of"),
        ("words.npy[1]", "holds values of type <U1; expected numbers"),
        ("cut.npy[1]", "is cut off"),
        ("no.npz::v[1]", "cannot be read as an array"),
    ],
)
def test_a_cell_that_names_no_value_is_an_error_with_row_and_reason(
    cell: str, message: str, folder: Path
) -> None:
    np.save(folder / "words.npy", np.array(list("abcdef")))
    (folder / "cut.npy").write_bytes((folder / "v.npy").read_bytes()[:-30])
    (folder / "no.npz").write_bytes(b"PK\x03\x04 no archive")
    os.symlink(folder.parent / "secret.npy", folder / "link.npy")
    cells = [f"v.npy[{n}]" for n in range(COUNT - 1)] + [cell]
    with pytest.raises(FusionZooError, match=message) as caught:
        create_dataset("manifest", root=manifest(folder, cells))[COUNT - 1]
    assert "row 7, sample 's5'" in str(caught.value) and "\n" not in str(caught.value)


def test_links_of_hdf5_lead_nowhere(folder: Path) -> None:
    with h5py.File(folder.parent / "secret.h5", "w") as file:
        file["v"] = VECTORS
    layout = h5py.VirtualLayout((COUNT, 5), np.float32)
    layout[:] = h5py.VirtualSource("../secret.h5", "v", (COUNT, 5))
    (folder.parent / "raw").write_bytes(VECTORS.tobytes())
    with h5py.File(folder / "b.h5", "w") as file:
        file["external"] = h5py.ExternalLink("../secret.h5", "/v")
        file["top"] = h5py.ExternalLink("../secret.h5", "/")
        file["soft"] = h5py.SoftLink("/external")
        file.create_virtual_dataset("virtual", layout)
        raw = [(str(folder.parent / "raw"), 0, VECTORS.nbytes)]
        file.create_dataset("raw", (COUNT, 5), np.float32, external=raw)
    for key in ("external", "top/v", "soft", "virtual", "raw"):
        with pytest.raises(FusionZooError, match=r"is a link|in other files"):
            open_array(folder / "b.h5", key)
    assert arrays.array_names(folder / "b.h5") == ["raw", "virtual"]


def test_a_header_that_announces_more_than_the_file_holds_takes_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9000000000, 9000), }"
    header += b" " * (117 - len(header)) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(40)
    (folder / "huge.npy").write_bytes(huge)
    for name, method in (("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(folder / f"{name}.npz", "w", method) as archive:
            archive.writestr("v.npy", huge)
    for name in ("huge.npy", "stored.npz", "deflated.npz"):
        with pytest.raises(FusionZooError, match=r"cannot be read as an array|is cut off"):
            open_array(folder / name)
    monkeypatch.setattr(arrays, "MAX_LOADED", 100)
    with pytest.raises(FusionZooError, match=r"is compressed.*numpy\.savez"):
        open_array(folder / "small.npz", "v")
    with pytest.raises(FusionZooError, match="chunks of"):
        with h5py.File(folder / "c.h5", "w") as file:
            file.create_dataset("v", data=VECTORS, compression="gzip", chunks=(6, 5))
        open_array(folder / "c.h5", "v")
    small = Budget(limit=4, unit="numbers", advice="store one array per sample")
    monkeypatch.setitem(BUDGETS, "numbers", small)
    with pytest.raises(FusionZooError, match="at most 4 numbers: store one array per sample"):
        decode("vector", str(folder / "v.npy[0]"))


def test_a_row_is_read_without_the_rest_of_its_file(folder: Path) -> None:
    """A sparse file of 8 GB, mapped: reading it whole would take that much memory."""
    assert isinstance(open_array(folder / "v.npy"), np.memmap)
    assert isinstance(open_array(folder / "several.npz", "v"), np.memmap)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2000000000, 1), }"
    header += b" " * (117 - len(header)) + b"\n"
    with (folder / "sparse.npy").open("wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        file.truncate(file.tell() + 8_000_000_000)
    value = decode("vector", str(folder / "sparse.npy[1999999999]"))
    assert value.tolist() == [0.0]


def test_a_value_that_fails_later_counts_as_missing_if_the_user_says_so(folder: Path) -> None:
    cells = [f"v.npy[{n}]" for n in range(COUNT - 1)] + ["v.npy[99]"]
    root = manifest(folder, cells)
    data = create_dataset("manifest", root=root, on_error="missing", max_errors=0.5)
    assert values(data, "vector")[-1] is None
    assert data.failures() == [("s5", "vector")]


def test_a_file_that_changes_is_read_anew_and_has_another_fingerprint(folder: Path) -> None:
    data = create_dataset("manifest", root=manifest(folder, ["v.npy[0]"] * COUNT))
    before, prints = values(data, "vector"), fingerprint(data, "vector")
    np.save(folder / "v.npy", VECTORS + 1)
    os.utime(folder / "v.npy", ns=(1, 1))
    assert_equal(values(data, "vector"), [x.numpy() + 1 for x in before])
    assert fingerprint(data, "vector") != prints


# ---- files that papers ship


N = 60
Y = np.arange(N) % 3 + 1  # classes from one, as MATLAB counts
A = np.random.default_rng(0).normal(size=(N, 5)) + Y[:, None]
B = np.random.default_rng(1).normal(size=(N, 2)) - Y[:, None]
Arrays = dict[str, Any]


def cells(*values: np.ndarray, down: bool = False) -> np.ndarray:
    """Return a cell array, 1 x V or V x 1."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape((-1, 1) if down else (1, -1))


def save_v73(path: Path, variables: Arrays) -> None:
    """Write a file as MATLAB 7.3 does: HDF5 behind 512 bytes, transposed, cells as references."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in variables.items():
            if value.dtype != object:
                file[name] = np.atleast_2d(value).T
                continue
            stored = file.create_dataset(name, value.T.shape, dtype=h5py.ref_dtype)
            stored.attrs["MATLAB_class"] = np.bytes_("cell")
            for place, entry in np.ndenumerate(value.T):
                file[f"#refs#/{name}{place}"] = entry.T
                stored[place] = file[f"#refs#/{name}{place}"].ref
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")


SAVE = {"v5.mat": savemat, "v73.mat": save_v73, "a.npz": lambda path, x: np.savez(path, **x)}


def check(dataset: PairedDataset, first: str = "view1", second: str = "view2") -> None:
    """Compare a data set with A, B and Y."""
    assert dataset.modalities == {first: "vector", second: "vector"}
    assert dataset.classes == ["1", "2", "3"]
    for row in (0, 7, N - 1):
        sample = dataset[row]
        np.testing.assert_allclose(sample.values[first], A[row], rtol=1e-6)
        np.testing.assert_allclose(sample.values[second], B[row], rtol=1e-6)
        assert sample.target == Y[row] - 1


@pytest.mark.parametrize(
    ("name", "variables", "names"),
    [
        ("v5.mat", {"X": cells(A, B), "Y": Y[:, None]}, ()),
        ("v5.mat", {"fea": cells(A.T, B.T, down=True), "gnd": Y, "num": 3}, ()),
        (
            "v5.mat",
            {"data": cells(A, B), "truth": np.eye(3)[Y - 1], "other": cells(A.T)},
            (),
        ),
        ("v5.mat", {"X1": A, "X2": B.T, "labels": np.eye(3)[Y - 1].T}, ("X1", "X2")),
        ("v73.mat", {"X": cells(A, B), "Y": Y[:, None].astype(float)}, ()),
        ("v73.mat", {"views": cells(A.T, B.T, down=True), "gt": Y}, ()),
        ("v73.mat", {"x1": A, "x2": B, "gt": np.eye(3)[Y - 1]}, ("x1", "x2")),
        ("a.npz", {"x_2": B, "x_1": A, "y": Y}, ("x_1", "x_2")),
        ("a.npz", {"sound": A, "film": B, "label": Y.astype("S"), "seed": 3}, ("sound", "film")),
        ("v5.mat", {"A": A, "B": B, "gt": Y, "labels": np.eye(3)[Y - 1]}, ("A", "B")),
        ("a.npz", {"id": A, "group": B, "target": Y}, ("my_id", "my_group")),
        ("v5.mat", {"X": A, "Y": B, "label": Y, "more": np.eye(7)}, ("X", "Y")),
    ],
)
def test_views_and_labels_are_found_by_names_and_shapes(
    name: str, variables: Arrays, names: tuple[str, ...], tmp_path: Path
) -> None:
    SAVE[name](tmp_path / name, variables)
    check(create_dataset(str(tmp_path / name)), *names)


@pytest.mark.parametrize("name", SAVE)
def test_names_of_variables_tell_the_splits(name: str, tmp_path: Path) -> None:
    parts = {"train": slice(0, 40), "test": slice(40, N)}
    variables: Arrays = {f"gt_{split}": Y[rows] for split, rows in parts.items()}
    for split, rows in parts.items():
        variables |= {f"x1_{split}": A[rows], f"x2_{split}": B[rows].T}
    SAVE[name](tmp_path / name, variables)
    dataset = create_dataset(str(tmp_path / name))
    check(dataset, "x1", "x2")
    assert dataset.split_names == ["train"] * 40 + ["test"] * 20


def test_a_square_view_is_as_the_others_are_which_is_said(tmp_path: Path) -> None:
    square = np.arange(N * N, dtype=float).reshape(N, N)
    for others, side, reason in (
        ([], "rows", "rows are samples"),
        ([A.T], "columns", "as in the other views"),
    ):
        savemat(tmp_path / "a.mat", {"X": cells(square, *others), "Y": Y})
        dataset = create_dataset(str(tmp_path / "a.mat"))
        first = square[:, 3] if others else square[3]
        sample = dataset[3]
        np.testing.assert_array_equal(sample.values["view1"], first.astype(np.float32))
        assert f"its {side} are samples ({reason})" in "\n".join(data_summary(dataset))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"x1": A, "x2": B}, "has no labels. It holds x1 (60 x 5), x2 (60 x 2); expected views"),
        ({"Y": Y, "name": "me"}, "has no views. It holds Y (1 x 60), name (1)"),
        ({"x1": A, "x2": B[:50], "Y": Y}, "fit neither rows nor columns of x2."),
        ({"x1": A, "x2": B * 1e39, "Y": Y}, "has numbers in x2 beyond those of float32"),
        ({"A": A[:9], "Y": Y}, "has 60 labels, and no array of as many samples"),
        (
            {"X": cells(A, B), "s": {"a": 1}, "t": 0},
            "X (cells of (60 x 5), (60 x 2)), s (struct)",
        ),
        ({"x_train": A, "y_train": Y, "x_test": A[:, :3], "y_test": Y}, "view x in several widths"),
        ({"x_train": A, "y_train": Y, "x_test": A}, "has no labels for the split test"),
    ],
)
def test_other_files_are_refused_with_what_they_hold(
    variables: Arrays, words: str, tmp_path: Path
) -> None:
    savemat(tmp_path / "a.mat", variables)
    with pytest.raises(FusionZooError) as caught:
        create_dataset(str(tmp_path / "a.mat"))
    assert words in str(caught.value) and str(caught.value).startswith(str(tmp_path / "a.mat"))


def test_a_folder_of_numbers_with_labels_apart_is_one_data_set(tmp_path: Path) -> None:
    parts = {"tr": slice(0, 40), "te": slice(40, N)}
    for split, rows in parts.items():
        for name, values in {"1": A, "2": B, "labels": Y}.items():
            np.savetxt(tmp_path / f"{name}_{split}.csv", values[rows], delimiter=",")
    (tmp_path / "1_featname.csv").write_bytes("BRCA1\nTGFβ1\n".encode("cp1253"))
    dataset = create_dataset(str(tmp_path))
    check(dataset)
    assert dataset.split_names == ["train"] * 40 + ["test"] * 20
    assert "left out: 1_featname" in "\n".join(data_summary(dataset))
    np.savetxt(tmp_path / "2_te.csv", B, delimiter=",")
    with pytest.raises(FusionZooError, match=r"neither rows nor columns of 2\."):
        create_dataset(str(tmp_path))


def test_a_table_without_a_header_is_read_by_one_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    np.savetxt(path, np.c_[A, Y], delimiter=",", fmt=["%.6f"] * 5 + ["%d"])
    with pytest.raises(FusionZooError, match=r"first row: .* header=.none. reads"):
        create_dataset(str(path))
    assert main(["data", "check", str(path), "--target", "c6", "--header", "none"]) == 0
    assert "60 samples, fit" in capsys.readouterr().out
    path.write_text("1,2,3\n" * 9 + "4,5\n")
    with pytest.raises(FusionZooError, match=r"row 10: 2 cells, but the first row has 3"):
        create_dataset(str(path), header="none")
    with pytest.raises(FusionZooError, match=r"header.*no.* is neither 'none' nor 'first'"):
        create_dataset(str(path), header="no")
    for text, words in (("2019,2020\n1,2\n3,4\n", "--data.header none"), ("0,1\n1,2\n", "")):
        path.write_text(text)
        reading = read_table(path, TableSettings())[1].reading
        assert words in "".join(reading) and bool(words) == bool(reading)


def test_rows_of_arrays_in_cells_are_vectors_without_a_setting(tmp_path: Path) -> None:
    np.save(tmp_path / "v0.npy", A)
    np.savez(tmp_path / "v1.npz", a=A[:, None])
    rows = [f"v0.npy[{row}],v1.npz::a[{row}],c{Y[row]}\n" for row in range(N)]
    (tmp_path / "a.csv").write_text("first,second,label\n" + "".join(rows))
    done = complete({"name": str(tmp_path / "a.csv")}, "label")
    assert done.settings["columns"]["vector"] == "first"
    assert done.settings["columns"]["sequence"] == "second"


def test_pickles_are_never_loaded_and_bombs_never_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", X=cells(A, B), y=Y)
    with pytest.raises(FusionZooError, match=r"X \(Python objects, never loaded\)"):
        create_dataset(str(tmp_path / "a.npz"))
    from fusionzoo.datasets.media import budgets

    zeros = np.zeros((N, 20_000))
    savemat(tmp_path / "b.mat", {"X": cells(zeros), "Y": Y}, do_compression=True)
    small = budgets.Budget(limit=1 << 20, unit="bytes", advice="")
    monkeypatch.setitem(budgets.BUDGETS, "table", small)
    with pytest.raises(FusionZooError, match="or more in memory"):
        create_dataset(str(tmp_path / "b.mat"))


def test_damaged_files_and_a_missing_package_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savemat(tmp_path / "a.mat", {"X": cells(A, B), "Y": Y}, do_compression=True)
    whole = (tmp_path / "a.mat").read_bytes()
    for cut in (0, 3, 100, 130, len(whole) // 2):
        (tmp_path / "b.mat").write_bytes(whole[:cut])
        with pytest.raises(FusionZooError, match=r"b\.mat"):
            create_dataset(str(tmp_path / "b.mat"))
    save_v73(tmp_path / "c.mat", {"x1": A, "x2": B, "gt": Y})
    whole = (tmp_path / "c.mat").read_bytes()
    for start in range(512, 2000, 40):  # of HDF5's tables
        (tmp_path / "b.mat").write_bytes(whole[:start] + b"\xa5" * 40 + whole[start + 40 :])
        with suppress(FusionZooError):
            create_dataset(str(tmp_path / "b.mat"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(FusionZooError, match=r"c\.mat is of MATLAB 7\.3: .*fusionzoo\[hdf5\]"):
        create_dataset(str(tmp_path / "c.mat"))


def test_a_file_trains_converts_and_its_model_reads_another(tmp_path: Path) -> None:
    save_v73(tmp_path / "a.mat", {"X": cells(A, B), "Y": Y})
    savemat(tmp_path / "b.mat", {"fea": cells(A.T, B.T), "gnd": Y})
    run, out = str(tmp_path / "run"), str(tmp_path / "shards")
    trained = ["train", str(tmp_path / "a.mat"), "--train.epochs", "1", "--out", run]
    assert main(trained) == 0
    assert main(["data", "convert", str(tmp_path / "b.mat"), out]) == 0
    check(create_dataset(out))
    answers = fz.predict(run, str(tmp_path / "b.mat"))
    assert len(answers) == N and {"p_1", "p_2", "p_3"} <= {*answers.column_names}
    rows = [{"view1": A[row], "view2": B[row]} for row in range(2)]
    probabilities = [row["p_1"] for row in fz.predict(run, rows)]
    assert probabilities == pytest.approx(answers["p_1"][:2].to_pylist(), rel=1e-4)
