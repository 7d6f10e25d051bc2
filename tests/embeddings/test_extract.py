"""Extraction of embeddings: order, resuming, formats, what each row holds."""

from __future__ import annotations

import csv
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import constants

import fusionzoo as fz
from fusionzoo import create_dataset, create_model
from fusionzoo.datasets import PairedDataset
from fusionzoo.embeddings.files import read_about
from fusionzoo.embeddings.parts import PartsFolder
from fusionzoo.encoders import at_hand
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.scripts.embed import main as embed

CHARS = {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 texts of very different lengths, in no order."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "texts.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "split", "target", "text"])
        for row in range(90):
            words = " ".join(["word"] * draw.randrange(1, 40))
            writer.writerow([f"r{row * 37 % 90}", "train", "ab"[row % 2], f"{row} {words}"])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    text_model = create_model("gmu", {"text": CHARS}, classes=["a", "b"], dim=6)
    return text_model.save(tmp_path_factory.mktemp("model"))


def flags(model: Path, table: Path, out: Path, *more: str) -> list[str]:
    data = ["--data.name", "manifest", "--data.root", str(table), "--num_workers", "0"]
    sizes = ["--batch_size", "8", "--row_group", "20"]
    return ["--model", str(model), *data, *sizes, "--out", str(out), *more]


def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list to which each batch that is encoded adds its ids."""
    seen: list[list[str]] = []
    embed_batch = FusionModel.embed_and_answer

    def noted(self: FusionModel, batch: Any) -> Any:
        if any(batch.ids):  # not the blank samples that measure widths
            seen.append(batch.ids)
        return embed_batch(self, batch)

    monkeypatch.setattr(FusionModel, "embed_and_answer", noted)
    return seen


@pytest.mark.parametrize("workers", ["0", "2"])
def test_rows_keep_the_order_of_the_table_and_batches_that_of_lengths(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    batches = batch_sizes(monkeypatch)
    out = tmp_path / "e.parquet"
    assert embed(flags(model, table, out, "--num_workers", workers)) == 0
    dataset = create_dataset(str(table))
    ids, vectors = fz.read_embeddings(out)
    assert ids == dataset.ids
    wanted = torch.cat([fz.load(model).embed([dataset[row]])["fused"] for row in range(90)])
    np.testing.assert_allclose(vectors, wanted.numpy(), atol=1e-6)
    written = pq.read_table(out)
    assert written["target"].to_pylist() == [*dataset.labels]
    assert written["present_text"].to_pylist() == [True] * 90
    lengths = dict(zip(dataset.ids, dataset.lengths().tolist(), strict=True))
    assert max(lengths.values()) in [lengths[key] for key in batches[0]]
    spread = [max(map(lengths.get, b)) - min(map(lengths.get, b)) for b in batches]  # type: ignore[type-var, arg-type, operator]
    assert np.mean(spread) < 0.5 * (max(lengths.values()) - min(lengths.values()))


def test_columns_of_the_table_are_read_once_however_many_batches_there_are(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: Counter[str] = Counter()
    chosen = PairedDataset.chosen

    def counted(self: PairedDataset, name: str) -> Any:
        cells[name] += len(self)
        return chosen(self, name)

    monkeypatch.setattr(PairedDataset, "chosen", counted)
    counts = []
    for size in ("60", "5"):
        cells.clear()
        assert embed(flags(model, table, tmp_path / "e.parquet", "--batch_size", size)) == 0
        counts.append(dict(cells))
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 3 * 90  # to open the data, to hash it, to write it


def test_what_the_model_does_not_read_is_not_decoded(tmp_path: Path) -> None:
    rows = [{"id": f"x{n}", "text": f"text {n}", "image": "none.png"} for n in range(6)]
    dataset = create_dataset(rows, on_error="missing", max_errors=1.0)
    text_model = create_model("sum", {"text": CHARS}, 1, dim=4)
    out = fz.embed(text_model, dataset, out=tmp_path / "e.parquet", num_workers=0)
    assert fz.read_embeddings(out).ids == dataset.ids
    assert dataset.failures() == []
    assert len(dataset[0].values) == 2 and len(dataset.failures()) == 1  # it would have failed


def test_a_batch_that_does_not_fit_is_halved_and_said_once(
    model: Path,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, halved = tmp_path / "plain.parquet", tmp_path / "halved.parquet"
    assert embed(flags(model, table, plain)) == 0
    capsys.readouterr()
    encode = FusionModel._run_encoders

    def scarce(self: FusionModel, batch: Any) -> Any:
        if len(batch.ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(self, batch)

    monkeypatch.setattr(FusionModel, "_run_encoders", scarce)
    assert embed(flags(model, table, halved)) == 0
    output = capsys.readouterr()
    message = "out of memory with 8 samples: continuing with 2 at a time"
    assert (output.out + output.err).count("out of memory") == 1
    assert message in output.out + output.err
    first, second = fz.read_embeddings(plain), fz.read_embeddings(halved)
    assert first.ids == second.ids
    np.testing.assert_allclose(first.vectors, second.vectors, atol=1e-6)


def test_a_sample_that_does_not_fit_alone_is_one_line(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = fz.load(model)  # loading runs a blank sample

    def never(self: FusionModel, batch: Any) -> Any:
        if any(batch.ids):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return encode(self, batch)

    encode = FusionModel._run_encoders
    monkeypatch.setattr(FusionModel, "_run_encoders", never)
    with pytest.raises(fz.FusionZooError, match=r"out of memory with sample 'r\d+' alone"):
        fz.embed(load, str(table), out=tmp_path / "e.parquet", batch_size=8)


class Killed(Exception):
    """Stands in for a kill: nothing handles it."""


def stop_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let extraction fail once this number of parts is written."""
    write, count = PartsFolder.write, Counter[str]()

    def counted(self: PartsFolder, part: int, rows: Any) -> None:
        if count["written"] == parts:
            raise Killed
        write(self, part, rows)
        count["written"] += 1

    monkeypatch.setattr(PartsFolder, "write", counted)


def test_an_interrupted_run_goes_on_and_writes_the_same_file(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = tmp_path / "whole.parquet", tmp_path / "resumed.parquet"
    assert embed(flags(model, table, whole)) == 0
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Killed):
            embed(flags(model, table, resumed))
    assert not resumed.exists()
    assert len(PartsFolder(resumed).finished()) == 2
    batches = batch_sizes(monkeypatch)
    assert embed(flags(model, table, resumed)) == 0
    assert sum(map(len, batches)) in (90 - 40, 90 - 30)  # the last part has ten rows
    assert resumed.read_bytes() == whole.read_bytes()
    assert not PartsFolder(resumed).folder.exists()


@pytest.mark.parametrize("differs", ["model", "data", "settings"])
def test_parts_of_another_extraction_are_refused_and_discarded_on_request(
    model: Path,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    differs: str,
) -> None:
    out, fresh = tmp_path / "e.parquet", tmp_path / "fresh.parquet"
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(Killed):
            embed(flags(model, table, out))
    more: list[str] = []
    if differs == "model":
        torch.manual_seed(1)
        other = create_model("gmu", {"text": CHARS}, classes=["a", "b"], dim=6)
        model = other.save(tmp_path / "other")
    elif differs == "data":
        changed = tmp_path / "changed.csv"
        changed.write_text(table.read_text().replace("7 word", "7 sword"))
        table = changed
    else:
        more = ["--normalise"]
    capsys.readouterr()
    differs = "values of text" if differs == "data" else differs
    assert embed(flags(model, table, out, *more)) == 2
    error = capsys.readouterr().err
    assert f"holds 3 parts of an extraction with other {differs}: remove that folder" in error
    shutil.rmtree(PartsFolder(out).folder)
    assert embed(flags(model, table, out, *more)) == 0
    assert embed(flags(model, table, fresh, *more)) == 0
    assert out.read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize("survive", range(6))
def test_a_kill_while_parts_are_removed_leaves_a_folder_that_goes_on(
    survive: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, key = PartsFolder(tmp_path / "emb.parquet"), {"model": "1", "data": "2"}
    unlink, removed = Path.unlink, []

    def killed(path: Path, missing_ok: bool = False) -> None:
        removed.append(path)
        if len(removed) > survive:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with parts.claimed(key):
        for part in range(5):
            parts.write(part, pa.table({"id": [str(part)]}))
        monkeypatch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            parts.remove()
        monkeypatch.undo()
    with parts.claimed(key):
        assert len(parts.finished()) == max(0, 5 - survive)


def test_two_extractions_do_not_write_one_file_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.embeddings.parts.PATIENCE", 0.3)
    parts = PartsFolder(tmp_path / "e.parquet")
    code = (
        "import sys, pathlib; from fusionzoo.embeddings.parts import PartsFolder\n"
        "with PartsFolder(pathlib.Path(sys.argv[1])).claimed({}):\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    import subprocess
    import sys

    command = [sys.executable, "-c", code, str(parts.out)]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with (
            pytest.raises(fz.FusionZooError, match=r"another extraction is writing .*e\.parquet"),
            parts.claimed({}),
        ):
            pass
        other.communicate(b"")


def test_rows_of_which_nothing_can_be_read_are_flagged_with_nulls(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    for row in range(40):
        np.save(tmp_path / f"{row}.npy", vectors[row])
    (tmp_path / "7.npy").write_bytes(b"no array")
    rows = [{"id": str(row), "vector": f"{row}.npy", "target": "a"} for row in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    small = create_model("sum", {"vector": {"name": "vector/mlp", "in_dim": 4, "dim": 3}}, 1, dim=2)
    for policy in ("missing", "skip"):
        data = {"name": "manifest", "root": str(tmp_path / "t.parquet"), "on_error": policy}
        for dtype in ("float32", "float16"):
            out = fz.embed(
                small, data, out=tmp_path / "e.parquet", row_group=16, batch_size=4, dtype=dtype
            )
            table = pq.read_table(out)
            assert table["id"].to_pylist() == [str(row) for row in range(40)]
            assert [i for i, x in enumerate(table["readable"].to_pylist()) if not x] == [7]
            for name in ("fused", "vector"):
                assert table[name].null_count == 1
                assert table[name][7].as_py() is None
                matrix = fz.read_embeddings(out, name).vectors
                assert np.isnan(matrix).any(1).nonzero()[0].tolist() == [7]


def test_probabilities_and_weights_are_those_of_the_model(
    model: Path, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "e.parquet"
    assert embed(flags(model, table, out, "--probabilities", "--weights", "--normalise")) == 0
    written = pq.read_table(out)
    predicted = fz.predict(model, str(table))
    np.testing.assert_allclose(
        np.array(written["probabilities"].to_pylist())[:, 1], predicted["p_b"], atol=1e-5
    )
    assert written["weights"].to_pylist() == [[1.0]] * 90
    lengths = np.linalg.norm(fz.read_embeddings(out).vectors, axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-6)
    about = read_about(out)
    assert about["classes"] == ["a", "b"]
    assert about["vectors"]["fused"] == {"width": 6, "normalised": True}
    assert about["model"] == str(model)


def test_prefixes_of_the_fused_vector_are_written_on_request(
    model: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e.parquet"
    assert embed(flags(model, table, out, "--matryoshka", "2,4")) == 0
    fused = fz.read_embeddings(out).vectors
    for size in (2, 4):
        np.testing.assert_array_equal(fz.read_embeddings(out, f"fused_{size}")[1], fused[:, :size])
    capsys.readouterr()
    assert embed(flags(model, table, out, "--matryoshka", "7")) == 2
    assert "--matryoshka 7: the fused vector has 6 entries" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "dtype", "error"),
    [
        ("e.parquet", "float16", 1e-3),
        ("e.npy", "float32", 1e-6),
        ("e.npy", "float16", 1e-3),
        ("shards", "float32", 1e-6),
    ],
)
def test_every_format_gives_the_same_ids_and_vectors(
    model: Path, table: Path, tmp_path: Path, name: str, dtype: str, error: float
) -> None:
    out, plain = tmp_path / name, tmp_path / "plain.parquet"
    assert embed(flags(model, table, plain)) == 0
    assert embed(flags(model, table, out, "--dtype", dtype)) == 0
    for column in ("fused", "text"):
        ids, vectors = fz.read_embeddings(out, column)
        wanted = fz.read_embeddings(plain, column)
        assert ids == wanted.ids
        np.testing.assert_allclose(vectors, wanted.vectors, atol=error)
        assert vectors.dtype == dtype
    assert read_about(out)["dtype"] == dtype
    with pytest.raises(fz.FusionZooError, match=r"has no vectors 'txt'\. Did you mean 'text'\?"):
        fz.read_embeddings(out, "txt")


def test_the_matrix_is_read_without_a_copy(model: Path, table: Path, tmp_path: Path) -> None:
    assert embed(flags(model, table, tmp_path / "e.npy")) == 0
    assert embed(flags(model, table, tmp_path / "e.parquet")) == 0
    assert isinstance(fz.read_embeddings(tmp_path / "e.npy").vectors, np.memmap)
    vectors = fz.read_embeddings(tmp_path / "e.parquet").vectors
    assert not vectors.flags.owndata
    assert not vectors.flags.writeable  # it is Arrow's memory


def frozen(dim: int) -> Any:
    return fz.wrap_encoder(torch.nn.Linear(4, dim), dim=dim, kind="vector", blank=torch.zeros(4))


def two_vectors() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    cells = draw.normal(size=(12, 2, 4)).tolist()
    rows = [{"id": str(n), "vector": x, "b": y} for n, (x, y) in enumerate(cells)]
    return {"name": "manifest", "root": rows, "kinds": {"b": "vector"}, "columns": {"b": "b"}}


FUSED: dict[str, Callable[[Any], Any]] = {
    "concat": lambda x: np.concatenate(x, 1),
    "mean": lambda x: np.mean(x, 0),
    "sum": lambda x: np.sum(x, 0),
    "max": lambda x: np.max(x, 0),
}


@pytest.mark.parametrize("fusion", FUSED)
def test_encoders_are_composed_without_training_or_random_weights(
    tmp_path: Path, fusion: str
) -> None:
    encoders = {"vector": frozen(3), "b": frozen(3)}
    out = fz.embed(two_vectors(), encoders=encoders, fusion=fusion, out=tmp_path / "e.parquet")
    parts = [fz.read_embeddings(out, name).vectors for name in ("b", "vector")]
    fused = fz.read_embeddings(out).vectors
    np.testing.assert_allclose(fused, FUSED[fusion](parts), atol=1e-6)


def test_a_composition_whose_weights_would_be_random_is_refused(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data.name", "manifest", "--data.root", str(table), "--out", str(tmp_path / "e.npy")]
    cases = {
        "--fusion gmu": "--fusion gmu: without training its weights would be random",
        "--encoders.text chars": "--encoders.text: the weights of chars would be random",
        "--encoders.txt chars": "has no modality 'txt'",
        "--fusion concat --model x": "compose a model without training: leave them out",
    }
    for words, message in cases.items():
        assert embed([*data, *words.split()]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(fz.FusionZooError, match=r'b 2, vector 3.*fusion="concat" takes any'):
        fz.embed(two_vectors(), encoders={"vector": frozen(3), "b": frozen(2)}, fusion="mean")


def test_without_the_hub_a_default_encoder_is_what_training_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = at_hand.WeightsPackage("pytest", ("pytest",), {"name": "chars"})
    monkeypatch.setattr(at_hand, "PACKAGES", {"text": installed})
    monkeypatch.setattr(at_hand, "is_cached", lambda name: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rows = [{"id": "a", "text": "a red bird"}]
    with pytest.raises(fz.FusionZooError, match="the weights of chars would be random"):
        fz.embed(rows, fusion="concat", out=tmp_path / "e.parquet")
    assert "Instead: text chars (package pytest, frozen)" in capsys.readouterr().out


def test_an_encoder_with_weights_from_a_file_is_composed(table: Path, tmp_path: Path) -> None:
    encoder = fz.create_encoder("text", **CHARS)
    torch.save(encoder.state_dict(), tmp_path / "w.pt")
    settings = {**CHARS, "weights": str(tmp_path / "w.pt")}
    out = fz.embed(str(table), encoders={"text": settings}, out=tmp_path / "e.parquet")
    wanted = create_model("sum", {"text": settings}, 1).embed([{"text": "one"}])["text"]
    assert wanted.shape == (1, 8)
    ids, fused = fz.read_embeddings(out)
    np.testing.assert_array_equal(fused, fz.read_embeddings(out, "text").vectors)
    assert len(ids) == 90


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out e.csv", "written as .parquet or .npy, or into a folder"),
        ("--matryoshka a", "--matryoshka 'a': expected sizes such as 64,128,256"),
        ("--dtype int8", "--dtype 'int8': input should be 'float32' or 'float16'"),
    ],
)
def test_a_wrong_setting_is_one_line(
    model: Path,
    table: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    message: str,
) -> None:
    assert embed(flags(model, table, tmp_path / "e.parquet", *words.split())) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_weights_of_a_fusion_without_any_are_one_line(table: Path, tmp_path: Path) -> None:
    plain = create_model("sum", {"text": CHARS}, 1, dim=4)
    with pytest.raises(fz.FusionZooError, match="fusion 'sum' computes no weight"):
        fz.embed(plain, str(table), out=tmp_path / "e.parquet", weights=True)
    with pytest.raises(fz.FusionZooError, match="probabilities=: the model was not trained on"):
        fz.embed(plain, str(table), out=tmp_path / "e.parquet", probabilities=True)
