"""Search in files of embeddings: what is near is found, and what does not fit is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image
from torch import nn

import fusionzoo as fz
from fusionzoo import FusionZooError
from fusionzoo.cli import main
from fusionzoo.embeddings.extract import model_digest
from fusionzoo.embeddings.files import ParquetFile
from fusionzoo.tools.search import vectors as vector_file
from fusionzoo.tools.search.query import check_same_space
from fusionzoo.tools.search.search import Searcher
from fusionzoo.tools.search.vectors import nearest, open_vectors

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of embeddings: `vectors` by column, (N, D), None for rows without."""

    def write(name: str = "e.parquet", about: Any = None, **columns: Any) -> Path:
        arrays = {}
        for key, values in columns.items():
            is_array = isinstance(values, np.ndarray) and values.ndim == 2
            if is_array:
                flat = pa.array(values.astype(np.float32).ravel())
                values = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            arrays[key] = values
        count = len(next(iter(columns.values())))
        table = pa.table({"id": [f"s{row}" for row in range(count)], **arrays})
        path = tmp_path / name
        table = table.replace_schema_metadata({"fusionzoo": json.dumps(about or {})})
        pq.write_table(table, path, row_group_size=64)
        return path

    return write


def drawn(rows: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def cosines(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    return vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)


def test_the_nearest_rows_are_those_of_a_full_comparison(write: Write) -> None:
    vectors, query = drawn(300), drawn(1, seed=1)[0]
    found = fz.search(write(fused=vectors), vector=query, k=7)
    expected = cosines(vectors, query)
    assert [hit.row for hit in found] == np.argsort(-expected)[:7].tolist()
    assert [hit.cosine for hit in found] == pytest.approx(sorted(expected)[::-1][:7], abs=1e-5)
    assert found.ids[0] == f"s{expected.argmax()}"
    assert found.searched == 300


@pytest.mark.parametrize("block", [7, 64, 1000])
def test_blocks_memory_and_stream_give_the_same_rows(block: int, write: Write) -> None:
    path, queries = write(fused=drawn(200)), torch.from_numpy(drawn(3, seed=1))
    in_memory = Searcher(path).nearest(queries, "fused", 5)
    streamed = nearest(open_vectors(path).blocks("fused", block), queries, 5)
    torch.testing.assert_close(streamed[0], in_memory[0])
    assert torch.equal(streamed[1], in_memory[1])


def test_a_searcher_answers_from_memory_but_for_long_texts_as_from_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{row} " * 200 for row in range(200)]
    about = {"vectors": {"fused": {"normalised": True}}}
    vectors = drawn(200) / np.linalg.norm(drawn(200), axis=1, keepdims=True)
    path = write(about=about, text=texts, year=np.arange(200), fused=vectors)
    expected = Searcher(path, stream=True).search(ids=["s3", "s7"]).to_dict()
    searcher = Searcher(path)
    assert searcher.search(ids=["s3", "s7"]).to_dict() == expected
    read = []
    take = ParquetFile.take
    monkeypatch.setattr(ParquetFile, "batches", None)
    monkeypatch.setattr(ParquetFile, "take", lambda *x: read.append(x[2]) or take(*x))
    assert searcher.search(ids=["s3", "s7"]).to_dict() == expected
    assert read == [["text"]]


@pytest.mark.parametrize("dim", [3, 65, 128])
def test_equal_rows_come_in_the_order_of_the_file(dim: int, write: Write) -> None:
    path = write(fused=np.repeat(drawn(1, dim), 5, axis=0))
    found = fz.search(path, vector=drawn(1, dim, seed=1)[0], k=9)  # more than there are
    assert found.ids == [f"s{row}" for row in range(5)]


def test_rows_without_a_vector_are_no_hits(write: Write) -> None:
    vectors = drawn(6)
    vectors[2], vectors[3, 0] = 0, np.nan
    listed = pa.array([*vectors.tolist()[:4], None, vectors[5].tolist()], pa.list_(pa.float16(), 8))
    path = write(image=listed, present_image=[True, False, True, True, True, True])
    assert {hit.row for hit in fz.search(path, vector=[1] * 8, by="image")} == {0, 5}


def test_vectors_of_integers_are_refused_as_no_embeddings(write: Write) -> None:
    path = write(fused=pa.array([[1] * 8] * 3, pa.list_(pa.int8(), 8)))
    with pytest.raises(FusionZooError, match="it needs a column `id` and columns of vectors"):
        fz.search(path, vector=[1] * 8)
    with pytest.raises(FusionZooError, match="has no vectors 'fused'"):
        fz.read_embeddings(path)


def test_ids_search_by_their_rows_and_are_no_hits_themselves(write: Write) -> None:
    vectors = drawn(100)
    vectors[[70, 71]] = vectors[[10, 11]] + 0.01
    path = write(fused=vectors)
    assert fz.search(path, id="s10", k=1).ids == ["s70"]
    both = fz.search(path, id=["s10", "s11"], k=99)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-cosines(vectors, units[10] + units[11])).tolist()
    assert [hit.row for hit in both] == [row for row in order if row not in (10, 11)]
    with pytest.raises(FusionZooError, match="has no row with the id 'nope'"):
        fz.search(path, id="nope")


def test_what_does_not_fit_is_one_line(write: Write, tmp_path: Path) -> None:
    path = write(fused=drawn(3), image=drawn(3, 4))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"vector": [1.0, 2.0]}, "'fused' has vectors of 8 numbers, and the query gives 2"),
        ({"vector": [0.0] * 8}, "has no direction"),
        ({"vector": [1.0] * 8, "by": "imag"}, "has no vectors 'imag'. Did you mean 'image'?"),
        ({}, "nothing to search for"),
        ({"text": "a"}, "names no model: --model"),
        ({"text": "a", "model": "nowhere"}, "was embedded by nowhere, which is not there"),
    ]
    for settings, message in cases:
        with pytest.raises(FusionZooError, match=re.escape(message)):
            fz.search(path, **settings)
    with pytest.raises(FusionZooError, match="no such file of embeddings"):
        fz.search(tmp_path / "none.parquet", vector=[1])
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(FusionZooError, match="cannot be read as embeddings"):
        fz.search(tmp_path / "a.parquet", vector=[1])
    pq.write_table(pa.table({"id": ["a"], "x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(FusionZooError, match="is no file of embeddings"):
        fz.search(tmp_path / "b.parquet", vector=[1])


def test_files_of_two_models_are_not_compared(write: Write) -> None:
    first = open_vectors(write("a.parquet", {"model_digest": "1"}, fused=drawn(3)))
    second = open_vectors(write("b.parquet", {"model_digest": "2"}, fused=drawn(3)))
    with pytest.raises(FusionZooError, match="the model digest of 'fused' is '2' there"):
        check_same_space(first, second, "fused")
    third = open_vectors(write("c.parquet", {"model_digest": "1"}, fused=drawn(3, 4)))
    with pytest.raises(FusionZooError, match="the width of 'fused' is 4 there and 8 here"):
        check_same_space(first, third, "fused")


@pytest.fixture(scope="module")
def stamps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a common space, and what it embeds of a table of texts, images and sounds."""
    folder = tmp_path_factory.mktemp("media")
    rows, rng = [], np.random.default_rng(0)
    for row in range(6):
        pixels = np.full((24, 24, 3), 40 * row, np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
        soundfile.write(folder / f"{row}.wav", 0.1 * rng.standard_normal(1600), 8000)
        media = {"image": f"{row}.png", "audio": f"{row}.wav", "text": f"thing [{row}]"}
        rows.append({"id": f"s{row}", "split": "test", "target": "ab"[row % 2], **media})
    rows[5]["audio"] = None
    pq.write_table(
        pa.Table.from_pylist([x | {"year": 2000 + i} for i, x in enumerate(rows)]),
        folder / "d.parquet",
    )
    torch.manual_seed(0)
    small = {"dim": 16, "num_layers": 1, "num_heads": 2, "max_length": 24}
    encoders = {
        "image": {"name": "timm/resnet10t", "pretrained": False},
        "text": {"name": "chars", **small},
        "audio": {"name": "mel/resnet10t", "pretrained": False, "duration": 0.2},
    }
    model = fz.create_model(
        "sum", encoders, classes=["a", "b"], kinds={m: m for m in encoders}, dim=8
    )
    dims = {name: encoder.dim for name, encoder in model.named_encoders()}
    model.complete(align={name: nn.Linear(width, 5) for name, width in dims.items()})
    saved = model.save(folder / "model")
    out = folder / "emb.parquet"
    data = {"name": "manifest", "root": str(folder / "d.parquet")}
    fz.embed(saved, data, out=str(out), num_workers=0)
    return saved, out


def test_texts_pictures_and_sounds_find_their_own_rows(stamps: tuple[Path, Path]) -> None:
    folder, searcher = stamps[1].parent, Searcher(stamps[1])
    row = searcher.search({"text": "thing [3]"}, by="text", k=1).hits[0]
    assert (row.id, row.cosine) == ("s3", pytest.approx(1, abs=1e-4))
    assert searcher.search({"image": str(folder / "2.png")}, by="aligned_image", k=1).ids == ["s2"]
    assert searcher.search({"audio": str(folder / "4.wav")}, by="audio", k=1).ids == ["s4"]
    whole = {"image": str(folder / "1.png"), "text": "thing [1]", "audio": str(folder / "1.wav")}
    assert searcher.search(whole, by="fused", k=1).hits[0].cosine == pytest.approx(1, abs=1e-4)
    assert searcher.search(whole, k=1).column == "aligned"
    both = searcher.search({"text": "thing [0]"}, ids=["s1"], k=9, by="fused")
    assert "s1" not in both.ids and both.query == "text thing [0] + id s1"
    with pytest.raises(FusionZooError, match="--by image compares vectors of image alone"):
        searcher.search({"text": "a"}, by="image")
    with pytest.raises(FusionZooError, match=r"no modality 'txt'\. Did you mean 'text'"):
        searcher.search({"txt": "a"})
    assert "s5" not in searcher.search({"audio": str(folder / "0.wav")}, by="audio", k=9).ids


def test_hits_have_paths(stamps: tuple[Path, Path]) -> None:
    found = fz.search(stamps[1], id="s0", by="text", k=9)
    assert {"s4", "s5"} <= {*found.ids} and "s0" not in found.ids
    hit = next(hit for hit in found if hit.id == "s4")
    assert hit.sources["image"] == str(stamps[1].parent / "4.png")
    assert hit.sources["text"] == "thing [4]" and hit.columns["target"] == "a"
    assert "audio" not in next(hit for hit in found if hit.id == "s5").sources


def test_a_file_of_some_rows_is_searched_like_the_whole_one(
    stamps: tuple[Path, Path], tmp_path: Path
) -> None:
    some = tmp_path / "some.parquet"
    pq.write_table(pq.read_table(stamps[1], filters=[("target", "==", "a")]), some)
    whole = fz.search(stamps[1], text="thing [4]", by="text", k=9)
    found = fz.search(some, text="thing [4]", by="text", k=9)
    expected = [(hit.id, hit.sources) for hit in whole if hit.columns["target"] == "a"]
    assert [(hit.id, hit.sources) for hit in found] == expected and len(expected) > 1


def test_a_model_that_did_not_embed_the_file_is_refused(
    stamps: tuple[Path, Path], tmp_path: Path
) -> None:
    table = pq.read_table(stamps[1])
    about = {"model": str(stamps[0]), "model_digest": model_digest(fz.load(stamps[0]))}
    right, wrong = tmp_path / "right.parquet", tmp_path / "wrong.parquet"
    for path, facts in ((right, about), (wrong, about | {"model_digest": "0" * 64})):
        metadata = {"fusionzoo": json.dumps(facts)}
        pq.write_table(table.replace_schema_metadata(metadata), path)
    assert fz.search(right, text="a").notes == [
        "the file does not name its data: --data says where it is",
        "ranked by score: 0 is the median row with the same modalities, 1 the nearest 1 %",
        "without audio: 1 of 6 rows, 1 of 6 hits",
    ]
    with pytest.raises(FusionZooError, match="is not the model that embedded"):
        fz.search(wrong, text="a")


def test_the_command_prints_a_table_json_and_a_page(
    stamps: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "p" / "out.html", tmp_path / "out.json"
    flags = ["--text", "thing [2]", "--by", "text", "--k", "3"]
    assert main(["search", str(stamps[1]), *flags, "--html", str(page), "--json", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "thing [2]" in shown and "2.png" in shown
    hits = json.loads(data.read_text())["hits"]
    assert [hit["rank"] for hit in hits] == [1, 2, 3] and hits[0]["id"] == "s2"
    text = page.read_text()
    assert text.count('<article class="sample">') == 3
    assert text.count("data:image/") == 3 and text.count("<audio controls") == 3
    assert "data:audio/ogg;base64," in text and "thing [2]" in text
    assert main(["search", str(stamps[1]), "--id", "[s0, s1]", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["query"] == "id s0 + id s1"
    assert main(["search", str(stamps[1])]) == 2
    assert capsys.readouterr().err == (
        "error: nothing to search for: --text, --image, --audio or --id\n"
    )


def test_reading_keeps_one_row_group_at_a_time(write: Write) -> None:
    path = write(fused=drawn(6_000, 64))
    start = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() - start for _ in open_vectors(path).blocks("fused"))
    assert most < 6_000 * 64 * 4 / 10  # of the file's bytes


def test_a_block_has_at_most_the_rows_that_were_asked_for(write: Write) -> None:
    path = write(fused=drawn(1000))
    sizes = [len(block.usable) for block in open_vectors(path).blocks("fused", 100)]
    assert max(sizes) <= 100 and sum(sizes) == 1000
    assert vector_file.READ * 256 * 4 <= 2**24  # bytes of a block of 256 numbers


def incomplete(write: Write, flags: bool = True, images: int = 1800) -> Path:
    """Write texts and images of shared contents, each modality with an offset of its own."""
    rng = np.random.default_rng(0)
    contents, offsets = drawn(2000, 32), 8 * drawn(2, 32, seed=1) / 32**0.5
    noise = drawn(4000, 32, seed=2).reshape(2, 2000, 32)
    text, image = ((contents + noise) / 3 + offsets[:, None]).astype(np.float32)
    has_image = rng.permutation(2000) < images
    image[~has_image] = 0
    present = {"present_image": has_image} if flags else {}
    return write(aligned_text=text, aligned_image=image, **present)


def near_texts(path: Path) -> torch.Tensor:
    vectors = open_vectors(path).some("aligned_text", range(0, 2000, 50))[0]
    return vectors + 0.02 * torch.from_numpy(drawn(40, 32, seed=6))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("flags", [True, False])
def test_rows_that_lack_a_picture_are_found_as_often_as_they_occur(
    flags: bool, stream: bool, write: Write
) -> None:
    path = incomplete(write, flags)
    lacks = ~open_vectors(path).some("aligned_image", range(2000))[1]
    _, found = Searcher(path, stream=stream).nearest(near_texts(path), "aligned", 20)
    assert lacks.double().mean() == 0.1
    assert 0.05 < lacks[found].double().mean() < 0.2


@pytest.mark.parametrize("images", [3, 1997])
def test_a_few_rows_with_other_modalities_are_neither_first_nor_last(
    images: int, write: Write
) -> None:
    path = incomplete(write, images=images)
    has = open_vectors(path).some("aligned_image", range(2000))[1]
    few = has if images == 3 else ~has
    found = Searcher(path).nearest(near_texts(path), "aligned", 2000)[1]
    assert 500 < few[found].nonzero()[:, 1].double().mean() < 1500


def test_results_say_how_many_rows_and_hits_lack_what(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = incomplete(write)
    found = fz.search(path, vector=near_texts(path)[0], by="aligned", k=20)
    lacking = sum(not hit.columns["present_image"] for hit in found)
    line = f"without image: 200 of 2,000 rows, {lacking} of 20 hits"
    assert line in found.notes and line in found.to_html(tmp_path / "x.html").read_text()
    scores = [hit.score for hit in found]
    assert None not in scores and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    expected = cosines(open_vectors(path).matrix("aligned")[0].numpy(), near_texts(path)[0].numpy())
    assert [h.cosine for h in found] == pytest.approx([expected[h.row] for h in found], abs=1e-4)
    assert main(["search", str(path), "--id", "s0", "--by", "aligned"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "score" in shown and "without image: 199 of 1,999 rows" in shown  # without s0
    alone = fz.search(path, vector=near_texts(path)[0], by="aligned_image")
    assert alone.hits[0].score is None and not any("without" in note for note in alone.notes)
