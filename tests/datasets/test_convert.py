"""Pickles of features: read without running them, and converted to manifests."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from fusionzoo import create_dataset
from fusionzoo.cli import main as console
from fusionzoo.datasets.sources.pickle_files import plain, read_pickle
from fusionzoo.errors import FusionZooError
from fusionzoo.tools.convert.pickles import convert_pickle
from helpers.memory import at_most

DRAW = np.random.default_rng(0)


def split(name: str, count: int) -> dict[str, Any]:
    """One split as MMSA has it."""
    lengths = [int(n) for n in DRAW.integers(1, 9, count)]
    audio = DRAW.standard_normal((count, 8, 5)).astype(np.float32)
    return {
        "id": [f"{name}$_${number}" for number in range(count)],
        "raw_text": np.array([f"text {number}" for number in range(count)]),
        "text": DRAW.standard_normal((count, 6, 4)),
        "audio": audio,
        "audio_lengths": [0, *lengths[1:]],
        "vision": DRAW.standard_normal((count, 7)),
        "text_bert": np.zeros((count, 3, 6)),
        "annotations": ["Positive", "Negative"] * (count // 2),
        "regression_labels": DRAW.standard_normal((count, 1)),
        "info": {"version": 1},
    }


@pytest.fixture
def mmsa() -> dict[str, dict[str, Any]]:
    return {"train": split("tr", 8), "valid": split("va", 4), "test": split("te", 4)}


def store(folder: Path, data: Any, protocol: int = 4) -> Path:
    path = folder / "data.pkl"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_containers_are_read_as_they_were(protocol: int, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "fortran": np.asfortranarray(DRAW.standard_normal((3, 2))),
        "big endian": np.arange(3, dtype=">i4"),
        "half": np.ones((2, 0), np.float16),
        "text": np.array(["ab", "c"]),
        "bytes": np.array([b"ab", b"c"]),
        "flags": np.array([True, False]),
        "scalar": np.array(3.5),
    }
    others = [1, 2.5, None, True, "é", b"\xff", (1, [2]), {3}, frozenset({4}), {"k": 10**30}]
    data = {
        "arrays": arrays,
        "others": [*others, bytearray(b"x"), np.float32(0.5), np.int64(7), OrderedDict(a=1)],
        "objects": np.array(["a", None, np.ones(2)], dtype=object),
    }
    read = read_pickle(store(tmp_path, data, protocol))
    for name, array in arrays.items():
        value = plain(read["arrays"][name])
        assert (value.dtype, value.shape) == (array.dtype, array.shape), name
        assert np.array_equal(value, array), name
    assert read["others"] == data["others"]
    assert plain(read["objects"])[:2].tolist() == ["a", None]
    assert plain(read["objects"])[2].tolist() == [1.0, 1.0]


class Malicious:
    """Creates a file when it is unpickled by Python's own reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


ARRAY = pickle.dumps(np.arange(3.0), protocol=2)
# ((((), ()), ((), ())), ...) with 2^99 leaves in 400 bytes; the last is number 99 of the memo.
TUPLES = b"\x80\x04)\x94" + b"".join(
    b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(99)
)
HOSTILE = {
    "a function": (b"cos\nsystem\n(S'touch {path}'\ntR.", "asks for: os.system"),
    "an instance": (b"(S'touch {path}'\nios\nsystem\n.", "asks for: os.system"),
    "an attribute of a function": (
        b"\x80\x02c_codecs\nencode\n}X\x01\x00\x00\x00aK\x01sb.",
        "state",
    ),
    "the state of a dict": (b"\x80\x02}}X\x01\x00\x00\x00aK\x01sb.", "the state of a dict"),
    "a persistent object": (b"Px\n.", "outside of the file"),
    "a buffer of 2 GB": (b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "bytearray"),
    "text of 1 PB": (b"\x80\x04\x8d" + (2**50).to_bytes(8, "little") + b"a.", "no pickle"),
    "a memo of 2 billion": (b"\x80\x02Nr\xff\xff\xff\x7fK\x01a.", "no pickle"),
    "a bytearray of 3.6 GB": (b"\x96" + (3_600_000_000).to_bytes(8, "little") + b"a.", "bytearray"),
    "tuples as a key": (TUPLES + b"}h\x63Ns.", "a key or an element"),
    "tuples as keys": (TUPLES + b"}(h\x63Nu.", "a key or an element"),
    "tuples in a dict": (TUPLES + b"(h\x63Nd.", "a key or an element"),
    "tuples in a set": (TUPLES + b"\x8f(h\x63\x90.", "a key or an element"),
    "tuples in a frozenset": (TUPLES + b"(h\x63\x91.", "a key or an element"),
    "tuples in a set of a call": (
        TUPLES + b"cbuiltins\nset\n](h\x63e\x85R.",
        "a key or an element",
    ),
    "an OrderedDict of tuples": (
        TUPLES + b"ccollections\nOrderedDict\n]](h\x63Nea\x85R.",
        "a key or an element",
    ),
    "tuples as a dtype": (TUPLES + b"cnumpy\ndtype\nh\x63\x85R.", "an array of type"),
    "copies of copies": (
        b"\x80\x04cbuiltins\nlist\n\x94]("
        + b"N" * 20_000
        + b"e\x94]("
        + b"h\0h\1\x85R" * 9999
        + b"e.",
        "by copying what it holds",
    ),
    "an integer of 4,000 digits": (pickle.dumps(10**4000), "an integer of 13,288 bits"),
    "an integer of 4,000 digits, as text": (b"L1" + b"0" * 4000 + b"L\n.", "an integer of 13,288"),
    "an integer of 5,000 digits, as text": (b"I1" + b"0" * 5000 + b"\n.", "no pickle"),
    "too many dimensions": (
        ARRAY.replace(b"K\x03\x85", b"(" + b"K\x03" * 65 + b"t"),
        "unknown format",
    ),
    "a cut file": (ARRAY[:-20], "no pickle that can be read"),
    "a larger shape": (ARRAY.replace(b"K\x03\x85", b"K\xff\x85"), "with other data"),
    "a negative shape": (ARRAY.replace(b"K\x03\x85", b"J\xff\xff\xff\xff\x85"), "unknown format"),
    "another type": (ARRAY.replace(b"f8", b"O8"), "array"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_in_one_line_and_runs_nothing(
    name: str, tmp_path: Path
) -> None:
    data, message = HOSTILE[name]
    assert data != ARRAY, "the replaced bytes are in the pickle"
    victim = tmp_path / "touched"
    path = store(tmp_path, data.replace(b"{path}", str(victim).encode()))
    with at_most(100_000_000), pytest.raises(FusionZooError) as caught:
        read_pickle(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not victim.exists()


def test_a_malicious_object_between_features_runs_nothing(
    mmsa: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "touched"
    mmsa["train"]["audio"][0, 0, 0] = 1
    mmsa["valid"]["evil"] = Malicious(victim)
    path = store(tmp_path, mmsa)
    assert console(["data", "convert", str(path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert "asks for: posix.system" in error or "asks for: nt.system" in error
    assert "nothing of it was run" in error and "\n" not in error
    assert not victim.exists() and not (tmp_path / "out").exists()
    pickle.loads(path.read_bytes())
    assert victim.exists(), "Python's own reader runs it"


def test_mutated_pickles_are_read_or_refused_in_one_line(mmsa: Any, tmp_path: Path) -> None:
    whole = pickle.dumps({"train": split("tr", 2)}, protocol=2)
    draw = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for place in draw.integers(0, len(data), draw.integers(1, 6)):
            data[place] = draw.integers(256)
        try:
            read_pickle(store(tmp_path, bytes(data)))
        except FusionZooError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 10


# ---- conversion


def test_a_pickle_becomes_a_manifest_that_opens_without_settings(mmsa: Any, tmp_path: Path) -> None:
    converted = convert_pickle(store(tmp_path, mmsa), tmp_path / "out")
    data = create_dataset("manifest", root=str(converted.manifest))
    assert data.modalities == {"text": "sequence", "audio": "sequence", "vision": "vector"}
    assert data.splits == {"train": 8, "val": 4, "test": 4}
    assert data.classes == ["Negative", "Positive"]
    samples = [data[row] for row in range(16)]
    row = 0
    for values in mmsa.values():
        for number, sample_id in enumerate(values["id"]):
            sample = samples[row]
            assert sample.id == sample_id
            for name in ("text", "vision"):
                expected = torch.tensor(values[name][number], dtype=torch.float32)
                torch.testing.assert_close(sample.values[name], expected)
            steps = values["audio_lengths"][number]
            audio = sample.values["audio"]
            assert (audio is None) == (steps == 0)
            if audio is not None:
                assert np.array_equal(audio, values["audio"][number][:steps])
            row += 1
    notes = "\n".join(converted.notes)
    for part in ("width 5, 3 of them missing", "'text_bert', token ids", "'info', one value"):
        assert part in notes
    settings = {"columns": {"target": "regression_labels"}, "targets": {"target": "regression"}}
    regression = create_dataset(converted.manifest, **settings)
    expected = np.concatenate([values["regression_labels"][:, 0] for values in mmsa.values()])
    assert np.allclose([float(label or "nan") for label in regression.labels], expected)


def test_lists_of_arrays_and_a_pickle_without_splits_are_read_too(tmp_path: Path) -> None:
    rows = [DRAW.standard_normal((n, 3)) for n in (2, 4, 1)]
    data = {"video": rows, "labels": np.array([0, 1, 0]), "names/../x": ["a", "b", "c"]}
    converted = convert_pickle(store(tmp_path, data), tmp_path / "out")
    table = pq.read_table(converted.manifest)
    assert "split" not in table.column_names
    assert table["id"].to_pylist() == ["sample-0", "sample-1", "sample-2"]
    assert table["names____x"].to_pylist() == ["a", "b", "c"]
    found = create_dataset("manifest", root=str(converted.manifest), targets={})
    for row, expected in enumerate(rows):
        sample = found[row]
        assert np.allclose(sample.values["video"], expected, atol=1e-6)


@pytest.mark.parametrize("indices", [False, True])
def test_samples_that_are_tuples_are_read_by_their_order(indices: bool, tmp_path: Path) -> None:
    def sample(number: int) -> Any:
        words = ["so", f"good{number}"]
        seen, heard = DRAW.standard_normal((2, 7)), DRAW.standard_normal((2, 3))
        label = np.array([[number / 2 - 1, 3.0]])  # sentiment, an emotion
        if indices:
            return (np.array([4, number]), seen, heard, words), label, f"v[{number}]"
        return (words, seen, heard), label, f"v[{number}]"

    train: list[Any] = [sample(n) for n in range(4)]
    data = {"train": train, "dev": [sample(4)], "test": [sample(5)]}
    converted = convert_pickle(store(tmp_path, data), tmp_path / "out")
    dataset = create_dataset(str(converted.manifest), targets={"target": "regression"})
    assert dataset.modalities == {"vision": "sequence", "audio": "sequence", "text": "text"}
    assert dataset.split_names == ["train"] * 4 + ["val", "test"]
    last = dataset[5]
    assert last.id == "v[5]" and last.values["text"] == "so good5"
    assert dataset.labels[5] == "1.5"
    np.testing.assert_allclose(last.values["vision"], data["test"][0][0][1], rtol=1e-6)
    train[2] = (1, 2)
    with pytest.raises(FusionZooError, match="sample 3 is no"):
        convert_pickle(store(tmp_path, data), tmp_path / "other")


def test_names_in_a_pickle_write_nothing_outside_of_the_folder(tmp_path: Path) -> None:
    rows = DRAW.standard_normal((3, 2))
    data = {"../../evil": rows, "/tmp/evil": rows, "a b": rows, "A_B": rows, "id": list("xyz")}
    convert_pickle(store(tmp_path, data), tmp_path / "out" / "deep")
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.npy"))
    names = ["______evil", "_tmp_evil", "a_b", "A_B_"]
    assert written == sorted(f"out/deep/{name}.npy" for name in names)


def test_values_that_are_not_finite_end_the_conversion_or_become_zeros(
    mmsa: Any, tmp_path: Path
) -> None:
    mmsa["valid"]["vision"][2, 3] = -np.inf
    path = store(tmp_path, mmsa)
    with pytest.raises(FusionZooError, match=r"'vision', sample 11: 1 of 7 values.*--nonfinite"):
        convert_pickle(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    converted = convert_pickle(path, tmp_path / "out", nonfinite="zero")
    assert any("not finite in 1" in note for note in converted.notes)
    sample = create_dataset("manifest", root=str(converted.manifest))[10]
    assert sample.values["vision"][3] == 0.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "holds a list; expected a dict"),
        ({"train": {"id": ["a"]}, "extra": {}}, "are not one each of the splits"),
        ({"train": {"a": np.ones((2, 2))}, "test": {}}, "split 'test' has no key 'a'"),
        ({"train": {"labels": [1, 2]}}, "holds no features"),
        ({"train": {"info": 3}}, "holds no arrays or lists"),
    ],
)
def test_another_layout_is_an_error_that_says_what_is_expected(
    data: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FusionZooError, match=message):
        convert_pickle(store(tmp_path, data), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_overwritten(mmsa: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(FusionZooError, match="is not an empty folder"):
        convert_pickle(store(tmp_path, mmsa), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_the_command_prints_what_to_do_next(
    mmsa: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store(tmp_path, mmsa)
    assert console(["data", "convert", str(path), f"{tmp_path}/out/"]) == 0
    printed = capsys.readouterr().out
    assert f"train {tmp_path / 'out' / 'manifest.parquet'}" in printed
    assert "sequence: audio, 16 samples, width 5" in printed


def test_a_small_pickle_cannot_take_the_machines_memory(tmp_path: Path) -> None:
    """Python's own reader in C allocates 64 GiB for the second index."""
    path = store(tmp_path, b"\x80\x02Nr\xff\xff\xff\x7f0]r\xff\xff\xff\xffNa.")
    with at_most(1_000_000):
        assert read_pickle(path) == [None]
