"""What papers ship: .mat of both versions, .npz, folders of numbers, tables without a header."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.io import savemat

import fusionzoo as fz
from fusionzoo import PairedDataset, create_dataset
from fusionzoo.cli import main
from fusionzoo.datasets.opening.complete import complete
from fusionzoo.datasets.sources.table_files import read_table
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError

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
        ("v5.mat", {"data": cells(A, B), "truth": np.eye(3)[Y - 1], "other": cells(A.T)}, ()),
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
        ({"X": cells(A, B), "s": {"a": 1}, "t": 0}, "X (cells of (60 x 5), (60 x 2)), s (struct)"),
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
