"""Paired data: aligned by id, missing where nothing is there, clear where something is wrong."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from PIL import Image
from torch.utils.data import DataLoader

from fusionzoo import PairedDataset, convert, create_dataset
from fusionzoo.datasets import Collate, PairedBatchSampler, make_sampler
from fusionzoo.encoders import create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import fingerprint
from fusionzoo.structures import Sample

HEADER = ("id", "split", "target", "image", "text", "audio")
ROWS = [
    ("a", "train", "cat", "a.png", "a small cat", "a.wav"),
    ("b", "train", "dog", "b.png", "", "b.wav"),
    ("c", "train", "cat", "", "two cats", ""),
    ("d", "val", "dog", "d.png", "a dog, barking", "d.wav"),
    ("e", "test", "cat", "e.png", "cat", ""),
]


def write_media(folder: Path) -> None:
    for key in "abde":
        Image.new("RGB", (8, 8), (10, 20, 30)).save(folder / f"{key}.png")
        soundfile.write(folder / f"{key}.wav", 0.1 * np.ones(800 * (1 + ord(key) % 3)), 8000)


def write_csv(
    path: Path, rows: Sequence[Sequence[str]] = ROWS, header: Sequence[str] = HEADER
) -> str:
    write_media(path.parent)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return str(path)


def test_without_a_split_column_a_hash_decides_and_added_rows_move_few(tmp_path: Path) -> None:
    lines = [f"{i},{i % 2},text {i}" for i in range(2000)]
    (tmp_path / "x.csv").write_text("\n".join(["id,target,text", *lines]))
    (tmp_path / "y.csv").write_text("\n".join(["id,target,text", *lines[:500]]))
    data, half = (create_dataset(tmp_path / name) for name in ("x.csv", "y.csv"))
    assert data.splits == {"train": 1400, "val": 300, "test": 300}
    moved = sum(x != y for x, y in zip(data.split_names, half.split_names, strict=False))
    assert 0 < moved < 30


def test_without_a_target_one_can_still_embed(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,text\n1,one\n2,two\n")
    data = create_dataset("manifest", root=str(tmp_path / "x.csv"))
    assert data.classes == []
    assert data[0].target is None


def test_sources_that_disagree_are_an_error() -> None:
    sample = {"id": "2", "split": "train"}
    one = create_dataset([{**sample, "target": "x", "vector": [2.0]}])
    other = create_dataset([{**sample, "target": "y", "text": "zwei"}])
    with pytest.raises(FusionZooError, match="id '2': sources disagree on its target"):
        PairedDataset.join({"sensor": one, "text": other})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"on_error": "ignore"}, "on_error='ignore': input should be 'raise'"),
        ({"missing": 1.5}, "missing=1.5; it must be a number of at least 0 and below 1"),
        ({"root": "nowhere.csv"}, "no file nowhere.csv"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write_csv(tmp_path / "data.csv")
    with pytest.raises(FusionZooError, match=says):
        create_dataset("manifest", **{"root": path, **settings})


def test_an_empty_split_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    data = create_dataset("manifest", root=write_csv(tmp_path / "data.csv", ROWS[:4]))
    with pytest.raises(
        FusionZooError, match=r"split 'test' is empty.* It has: train \(3\), val \(1\)"
    ):
        data.split("test")


def broken(tmp_path: Path, on_error: str) -> PairedDataset:
    path = write_csv(tmp_path / "data.csv")
    (tmp_path / "a.png").write_bytes(b"no picture")
    (tmp_path / "b.wav").unlink()
    return create_dataset("manifest", root=path, on_error=on_error)


def collate() -> Collate:
    encoders = (
        create_encoder("image", "timm/resnet10t", pretrained=False, size=32),
        create_encoder("text", "chars", dim=8, num_heads=2),
        create_encoder("audio", "mel/resnet10t", pretrained=False, duration=0.2),
    )
    return Collate({e.modality: e.processor(False) for e in encoders})


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_may_count_as_missing(workers: int, tmp_path: Path) -> None:
    data = broken(tmp_path, "missing")
    (batch,) = DataLoader(data, batch_size=5, collate_fn=collate(), num_workers=workers)
    assert batch.ids == list("abcde")
    assert batch.present[:2].tolist() == [[False, True, True], [True, False, False]]
    assert data.failures() == [("a", "image"), ("b", "audio")]


def test_what_cannot_be_read_may_be_skipped(tmp_path: Path) -> None:
    data = broken(tmp_path, "skip")
    (batch,) = DataLoader(data, batch_size=5, collate_fn=collate())
    assert batch.ids == list("cde")
    assert data.failures() == [("a", "image"), ("b", "audio")]
    nothing = collate()([None, None])
    assert (nothing.ids, nothing.present.shape) == ([], (0, 3))
    assert nothing.inputs["image"]["pixels"].shape == (0, 3, 32, 32)


def test_a_batch_is_aligned_and_padded(tmp_path: Path) -> None:
    data = create_dataset("manifest", root=write_csv(tmp_path / "data.csv"))
    batch = collate()([data[i] for i in range(5)])
    assert batch.target.tolist() == [0, 1, 0, 1, 0]
    assert torch.equal(batch.present, data.present)
    assert batch.inputs["image"]["pixels"].dtype == torch.uint8
    assert batch.inputs["audio"]["wave"].dtype == torch.int16
    lengths = batch.inputs["text"]["attention_mask"].sum(1).tolist()
    assert lengths == [len(row[4]) + 1 for row in ROWS]  # and a start token


def test_modalities_may_be_selected_and_dropped_at_random(tmp_path: Path) -> None:
    data = create_dataset(
        "manifest", root=write_csv(tmp_path / "data.csv"), modalities="audio,image"
    )
    assert list(data.modalities) == ["image", "audio"]
    assert data.ids == list("abde")  # c has neither
    digits = create_dataset("digits")
    fewer, again = (create_dataset("digits", missing=0.4) for _ in range(2))
    assert torch.equal(fewer.present, again.present)
    assert fewer.present.any(1).all()
    rates = fewer.present.double().mean(0)
    assert ((rates > 0.58) & (rates < 0.68)).all()  # 0.6, and what is kept lest nothing be left
    assert fewer.ids == digits.ids


def test_a_selection_keeps_the_classes_so_that_models_stay_comparable(tmp_path: Path) -> None:
    rows = [row if row[0] != "c" else (*row[:2], "emu", *row[3:]) for row in ROWS]
    path = write_csv(tmp_path / "data.csv", rows)
    data = create_dataset("manifest", root=path, modalities="image")
    assert data.classes == ["cat", "dog", "emu"]  # though no image of an emu is left
    assert data.targets.tolist() == [0, 1, 1, 0]
    with pytest.raises(FusionZooError, match="no sample has audio"):
        create_dataset("manifest", root=path).split("test").select("audio")


def test_a_width_is_that_of_the_first_vector_that_can_be_read(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.zeros(4))
    (tmp_path / "x.csv").write_text("id,vector\na,a.npy\nb,b.npy\n")
    data = create_dataset("manifest", root=str(tmp_path / "x.csv"), on_error="missing")
    assert data.default_encoders["vector"]["in_dim"] == 4
    with pytest.raises(FusionZooError, match="no target column"):
        _ = data.targets


def test_text_in_categories_is_text(tmp_path: Path) -> None:
    columns = {"id": ["a", "b"], "text": pa.array(["x", "y"]).dictionary_encode()}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    data = create_dataset("manifest", root=str(tmp_path / "x.parquet"))
    assert [data[i].values["text"] for i in range(2)] == ["x", "y"]


def test_hidden_files_are_no_samples(tmp_path: Path) -> None:
    for name in ("cat/1.txt", "cat/._1.txt", ".trash/2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a cat")
    data = create_dataset("folders", root=str(tmp_path), shares=(1, 0, 0))
    assert data.ids == ["cat/1"]
    with pytest.raises(FusionZooError, match="no folder ''"):
        create_dataset("folders")


def test_a_sample_looks_its_class_up_without_walking_through_all_classes() -> None:
    class Unsearchable(list[str]):
        def index(self, *_: Any) -> int:
            raise AssertionError("a search through all classes")

    data = create_dataset("interactions", samples=60)
    wanted = data.targets.tolist()
    data.classes = Unsearchable(data.classes)
    samples = [data[row] for row in range(60)]
    assert [sample.target for sample in samples if sample is not None] == wanted


def upper(sample: Sample) -> Sample | None:
    text = sample.values["text"]
    return None if text is None else with_text(sample, text.upper())


def with_text(sample: Sample, text: str) -> Sample:
    return sample._replace(values={**sample.values, "text": text})


def test_an_edited_view_changes_what_is_decoded_one_edit_after_another(tmp_path: Path) -> None:
    data = create_dataset("manifest", root=write_csv(tmp_path / "data.csv"))
    edited = data.edited(upper).edited(lambda x: with_text(x, x.values["text"] + "!"))
    texts = [sample and sample.values["text"] for sample in (edited[row] for row in range(5))]
    assert texts == ["A SMALL CAT!", None, "TWO CATS!", "A DOG, BARKING!", "CAT!"]
    assert edited.subset([3, 0]).only("text")[(0, 7)].values == {"text": "A DOG, BARKING!"}
    assert edited.references("text") == data.references("text")
    assert data[0].values["text"] == "a small cat"
    copy = pickle.loads(pickle.dumps(data.edited(upper)))
    assert copy[4].values["text"] == "CAT"


def test_an_edited_view_is_not_stored_joined_or_cached_as_if_it_were_not(tmp_path: Path) -> None:
    data = create_dataset("manifest", root=write_csv(tmp_path / "data.csv")).edited(upper)
    actions = {
        "written as a manifest": lambda: data.to_manifest(tmp_path / "out.csv"),
        "written as shards": lambda: convert(data, tmp_path / "shards", progress=False),
        "joined": lambda: PairedDataset.join({"a": data, "b": data}),
        "looked up in the cache of features": lambda: fingerprint(data, "text"),
    }
    for action, act in actions.items():
        with pytest.raises(FusionZooError, match=f"an edited view cannot be {action}"):
            act()
    assert not (tmp_path / "out.csv").exists()


# ---- the order of samples


class Rows:
    """As much of a data set as a sampler needs."""

    def __init__(self, size: int) -> None:
        self.targets = (torch.arange(size) % 10 == 0).long()  # one in ten is of class 1

    def __len__(self) -> int:
        return len(self.targets)


def shards(size: int, world: int, **settings: object) -> list[list[int]]:
    return [
        list(make_sampler(Rows(size), distributed=(rank, world), **settings))  # type: ignore[arg-type]
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_sees_each_sample_once(world: int) -> None:
    parts = shards(20, world, shuffle=False)
    assert sorted(i for part in parts for i in part) == list(range(20))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("tail", [{}, {"pad": True}])
def test_training_gives_each_process_the_same_number(tail: dict[str, bool]) -> None:
    parts = shards(20, 3, shuffle=True, **tail)
    assert [len(part) for part in parts] == [7] * 3
    assert len({i for part in parts for i in part}) == 20


def test_more_processes_than_samples_still_get_one_each() -> None:
    assert [len(part) for part in shards(2, 5, shuffle=True)] == [1] * 5
    assert sum(len(part) for part in shards(2, 5, shuffle=False)) == 2


def test_epochs_differ_and_repeat_exactly() -> None:
    sampler = make_sampler(Rows(50), shuffle=True, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(make_sampler(Rows(50), shuffle=True, seed=4)) != first


@pytest.mark.parametrize("world", [1, 2])
def test_class_weights_show_each_class_as_often(world: int) -> None:
    rows = Rows(2000)
    seen = [i for part in shards(2000, world, shuffle=True, weights="class") for i in part]
    assert len(seen) == 2000
    assert rows.targets[seen].double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_given_weights_leave_out_what_has_none() -> None:
    weights = torch.zeros(30)
    weights[[4, 9]] = torch.tensor([1.0, 3.0])
    seen = [i for part in shards(30, 2, shuffle=True, weights=weights) for i in part]
    assert set(seen) == {4, 9}


@pytest.mark.parametrize("lengths", [None, torch.arange(23).flip(0)])
def test_two_processes_see_the_rows_of_one_with_the_double_batch(
    lengths: torch.Tensor | None,
) -> None:
    whole = PairedBatchSampler(make_sampler(Rows(22), shuffle=True), 8, lengths=lengths)
    parts = [
        PairedBatchSampler(
            make_sampler(Rows(22), shuffle=True, distributed=(rank, 2)), 4, lengths=lengths
        )
        for rank in range(2)
    ]
    for epoch in range(3):
        for one in (whole, *parts):
            one.set_epoch(epoch)
        for batch, *shares in zip(whole, *parts, strict=True):
            assert sorted(batch) == sorted(key for share in shares for key in share)


@pytest.mark.parametrize("lengths", [None, torch.arange(50) % 7])
def test_a_pass_may_begin_in_the_middle(lengths: torch.Tensor | None) -> None:
    sampler = PairedBatchSampler(make_sampler(Rows(50), shuffle=True), 8, lengths=lengths)
    sampler.set_epoch(4)
    everything = list(sampler)
    assert len(everything) == len(sampler) == 7
    sampler.set_epoch(0)
    for start, stop in ((3, 7), (0, 2)):
        sampler.set_part(4, start, stop)
        assert list(sampler) == everything[start:stop]
        assert len(sampler) == stop - start


def test_each_visit_has_a_seed_of_its_own() -> None:
    sampler = PairedBatchSampler(make_sampler(Rows(40), shuffle=True), 8)
    keys = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        keys |= {key for batch in sampler for key in batch}
    assert len({seed for _, seed in keys}) == 120
    assert all(seed > 0 for _, seed in keys)


@pytest.mark.parametrize("shuffle", [True, False])
def test_similar_lengths_meet(shuffle: bool) -> None:
    lengths = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    rows = Rows(400)

    def spread(given: torch.Tensor | None) -> float:
        sampler = PairedBatchSampler(make_sampler(rows, shuffle=shuffle), 16, lengths=given)
        found = [lengths[[i for i, _ in batch]].double() for batch in sampler]
        return sum(float(x.max() - x.min()) for x in found) / len(found)

    assert spread(lengths) < 0.1 * spread(None)
    sampler = PairedBatchSampler(make_sampler(rows, shuffle=shuffle), 16, lengths=lengths)
    assert sorted(i for batch in sampler for i, _ in batch) == list(range(400))


def test_batches_that_would_never_come_are_an_error() -> None:
    with pytest.raises(FusionZooError, match="nothing to sample from: 0 samples"):
        make_sampler(Rows(0), shuffle=True)
    with pytest.raises(FusionZooError, match="batch_size=0"):
        PairedBatchSampler(make_sampler(Rows(4), shuffle=True), 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"distributed": (2, 2)}, "the rank must be below 2"),
        ({"weights": [1.0, 2.0]}, "2 weights for 10 samples"),
        ({"weights": [-1.0] * 10}, "10 weights for"),
        ({"weights": [float("nan")] * 10}, "10 weights for"),
        ({"weights": [0.0] * 10}, "all weights are 0"),
        ({"weights": "clas"}, "only named scheme is 'class'"),
    ],
)
def test_a_wrong_request_is_one_clear_error(settings: dict[str, object], says: str) -> None:
    with pytest.raises(FusionZooError, match=says):
        make_sampler(Rows(10), shuffle=True, **settings)  # type: ignore[arg-type]
