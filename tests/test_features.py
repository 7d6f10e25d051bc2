"""The cache returns what the encoder computes, and an entry is complete or absent."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo import create_dataset, create_encoder
from fusionzoo.benchmark.feeds import KeptSamples, measure
from fusionzoo.cli import main
from fusionzoo.datasets import Collate
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.features import cache as cache_module
from fusionzoo.features.cache import CachedParts, FeatureCache, feature_cache, load_features
from fusionzoo.features.encode import Compute, PartStore, StoredFeatures, describe, encode, key_of
from fusionzoo.model.fusion_model import encode_rows
from fusionzoo.model.standardise import LENGTH, Standardise
from fusionzoo.structures import Features

pytestmark = pytest.mark.usefixtures("own_cache")
SCRATCH = {
    "image": ("timm/resnet10t", {"pretrained": False, "size": 32, "channels": [8, 8, 8, 8]}),
    "text": ("chars", {"dim": 16, "max_length": 16}),
    "audio": ("mel/stats", {"rate": 8000, "num_mels": 20}),
}


def build(modality: str) -> Encoder:
    torch.manual_seed(0)
    name, settings = SCRATCH[modality]
    encoder = create_encoder(modality, name, **settings)
    encoder.freeze()
    return encoder


def some(rows: int = 40, missing: float = 0.3):  # type: ignore[no-untyped-def]
    return create_dataset("digits", missing=missing).subset(range(rows))


@pytest.mark.parametrize("modality", SCRATCH)
def test_cached_features_equal_the_encoders_and_are_computed_once(
    modality: str, tmp_path: Path
) -> None:
    encoder, dataset = build(modality), some()
    description = describe(encoder, dataset)
    cache = FeatureCache(tmp_path)
    cache.get(description, lambda _: encode(encoder, dataset, Compute(batch_size=7)))
    rows = torch.tensor([3, 0, 17, 39, 17])
    cached = cache.get(description, lambda _: pytest.fail("computed again")).take(rows)
    batch = Collate({modality: encoder.processor(False)})([dataset[row] for row in rows.tolist()])
    with torch.no_grad():
        encoded = encode_rows(encoder, batch.inputs[modality], batch.presence()[:, 0])
    present = batch.present[:, 0]
    assert torch.equal(cached.mask.any(1), present)
    assert torch.equal(cached.mask.sum(1)[present], encoded.mask.sum(1)[present])
    close = {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(cached.pooled[present], encoded.pooled[present], **close)
    assert all(len(x) == len(y) for x, y in zip(cached, encoded, strict=True))
    torch.testing.assert_close(cached.tokens[cached.mask], encoded.tokens[encoded.mask], **close)


class Stopped(Exception):
    """What a user's Ctrl-C or a time limit raises."""


def test_an_encoding_that_is_stopped_goes_on_and_ends_with_the_same_features(
    tmp_path: Path,
) -> None:
    encoder, dataset = build("text"), some()
    description, cache = describe(encoder, dataset), FeatureCache(tmp_path)
    sizes: list[int] = []

    def stop_at_every_second_batch(features: Features) -> None:
        sizes.append(len(features.pooled))
        if len(sizes) % 2 == 0:
            raise Stopped

    def compute(parts: PartStore) -> StoredFeatures:
        watch = stop_at_every_second_batch
        return encode(encoder, dataset, Compute(batch_size=7), after_batch=watch, parts=parts)

    for _ in range(2):
        with pytest.raises(Stopped):
            cache.get(description, compute)
        assert cache.load(description) is None
    assert len(list(cache.entries())) == 2
    stored, whole = cache.get(description, compute), encode(encoder, dataset, Compute(batch_size=7))
    assert sum(sizes) == int(whole.present.sum())
    assert all(torch.equal(x, y) for x, y in zip(stored, whole, strict=True))
    assert [entry.key for entry in cache.entries()] == [key_of(description)]


def test_what_is_encoded_is_stored_while_the_rest_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed raises nothing."""
    monkeypatch.setattr("fusionzoo.features.encode.SAVE_EVERY", -1.0)
    encoder, dataset = build("text"), some(missing=0.0)
    parts = CachedParts(FeatureCache(tmp_path), describe(encoder, dataset))
    stored: list[int] = []

    def count(_: Features) -> None:
        stored.append(sum(len(part.pooled) for part in parts.load()))

    encode(encoder, dataset, Compute(batch_size=15), after_batch=count, parts=parts)
    assert stored == [15, 30, 40]


def test_the_key_follows_weights_preprocessing_and_data() -> None:
    encoder, dataset = build("text"), some()
    key = key_of(describe(encoder, dataset))
    assert key == key_of(describe(build("text"), some()))
    torch.manual_seed(0)
    shorter = create_encoder("text", "chars", dim=16, max_length=12)
    other = build("text")
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-3
    assert len({key, *(key_of(describe(e, dataset)) for e in (shorter, other))}) == 3
    assert key != key_of(describe(encoder, some(39)))
    assert key != key_of(describe(encoder, create_dataset("digits", seed=1).subset(range(40))))


def test_a_changed_file_changes_the_key(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(2):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    table = tmp_path / "table.csv"
    table.write_text("id,split,target,image,text\n1,train,a,0.png,x\n2,test,a,1.png,y\n")
    encoder = build("image")
    before = key_of(describe(encoder, create_dataset("manifest", root=str(table))))
    time.sleep(0.01)
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "1.png")
    assert before != key_of(describe(encoder, create_dataset("manifest", root=str(table))))


ENTRY = {"data": "some", "modality": "text", "encoder": {"name": "chars"}}


def numbers() -> StoredFeatures:
    return StoredFeatures(torch.rand(10, 4), torch.rand(10, 4), torch.arange(11))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated array": lambda x: (x / "tokens.bin").write_bytes(b"1234"),
    "missing array": lambda x: (x / "offsets.bin").unlink(),
    "array is a folder": lambda x: replace_by_a_folder(x / "tokens.bin"),
    "flip in tokens": lambda x: flip(x / "tokens.bin"),
    "flip in about": lambda x: flip(x / "about.json"),
    "truncated about": lambda x: (x / "about.json").write_text('{"key": '),
    "garbage in about": lambda x: (x / "about.json").write_bytes(b"\xff\x00\xfe"),
    "nested about": lambda x: (x / "about.json").write_text("[" * 100_000),
    "about is a list": lambda x: (x / "about.json").write_text("[]"),
    "about is a folder": lambda x: replace_by_a_folder(x / "about.json"),
    "missing about": lambda x: (x / "about.json").unlink(),
    "another shape": lambda x: edit(x / "about.json", "10", "40"),
    "another dtype": lambda x: edit(x / "about.json", "float32", "int32"),
    "unknown dtype": lambda x: edit(x / "about.json", "float32", "load"),
    "another entry": lambda x: edit(x / "about.json", x.name, "0" * 24),
    "a file": replace_by_a_file,
    "an empty folder": lambda x: [file.unlink() for file in x.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_kind_is_said_in_a_line_and_computed_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    cache, stored = feature_cache(), numbers()
    cache.save(ENTRY, stored)
    folder = cache.root / key_of(ENTRY)
    DAMAGES[damage](folder)
    monkeypatch.setattr("fusionzoo.features.cache._mapped", {})  # as in another process
    main(["cache", "list"])
    assert "1 entries" in capsys.readouterr().out
    again = cache.get(ENTRY, lambda _: stored)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"warning: {folder}")
    assert said[0].endswith("; the entry is removed and computed again")
    for array, expected in zip(again, stored, strict=True):
        assert array.equal(expected)
    assert cache.load(ENTRY) is not None
    assert not capsys.readouterr().out
    DAMAGES[damage](folder)
    main(["cache", "prune", "--all"])
    assert not list(cache.root.iterdir())


def test_files_of_others_in_the_cache_are_left_alone(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.save(ENTRY, numbers())
    for name in ("notes.txt", "mine.part-x", "mine.part-"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "lost").symlink_to("nowhere")
    assert [entry.key for entry in cache.entries()] == [key_of(ENTRY)]
    cache.prune(keep_days=0.0)
    assert len(list(tmp_path.iterdir())) == 5


def test_digests_are_checked_once_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, sha256 = FeatureCache(tmp_path), hashlib.sha256
    hashed: list[int] = []

    def counted(data: Any) -> Any:
        hashed.append(len(data))
        return sha256(data)

    cache.save(ENTRY, numbers())
    monkeypatch.setattr("fusionzoo.features.cache._mapped", {})  # as in another process
    monkeypatch.setattr(hashlib, "sha256", counted)
    for _ in range(3):
        cache.load(ENTRY)
    assert sum(length == 160 for length in hashed) == 2  # pooled and tokens


def test_mapped_features_outlive_their_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    cache, stored = feature_cache(), numbers()
    cache.save(ENTRY, stored)
    FeatureCache(cache.root).prune(keep_days=0.0)
    assert cache.load(ENTRY) is None
    assert load_features(ENTRY).tokens.equal(stored.tokens)
    with pytest.raises(FusionZooError, match="are gone from"):
        load_features({**ENTRY, "data": "others"})


def test_processes_go_on_while_another_one_prunes(tmp_path: Path) -> None:
    cache, stored = FeatureCache(tmp_path), numbers()
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            status = 1
            try:
                for number in range(150):
                    found = cache.get({**ENTRY, "view": number % 2}, lambda _: stored)
                    assert found.tokens.equal(stored.tokens)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    states: list[int | None] = [None] * len(children)
    while None in states:
        cache.prune(keep_days=0.0)
        for number, child in enumerate(children):
            if states[number] is None:
                ended, status = os.waitpid(child, os.WNOHANG)
                states[number] = status if ended else None
    assert states == [0, 0, 0]


WRITER = """
import sys, torch
from pathlib import Path
from fusionzoo.features.cache import FeatureCache
from fusionzoo.features.encode import StoredFeatures
stored = StoredFeatures(torch.ones(50_000, 64), torch.ones(50_000, 64), torch.arange(50_001))
cache = FeatureCache(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    cache.save({"entry": number % 3}, stored)
print("done", flush=True)
"""


def writer(folder: Path, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, str(folder), str(rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_entries_are_complete_when_writers_race_and_are_killed(tmp_path: Path) -> None:
    both = [writer(tmp_path, 4), writer(tmp_path, 4)]
    victim = writer(tmp_path, 1000)
    for process in (*both, victim):
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in (*both, victim):
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    time.sleep(0.3)
    os.kill(victim.pid, signal.SIGKILL)
    for process in both:
        stdout, _ = process.communicate(timeout=60)
        assert stdout == "done\n"
        assert process.returncode == 0
    victim.communicate()
    cache = FeatureCache(tmp_path)
    assert len(list(cache.entries())) == 3
    for number in range(3):
        stored = cache.load({"entry": number})
        assert stored is not None
        assert bool((stored.tokens == 1).all())
    parts = list(tmp_path.glob("*.part-*"))
    cache.prune(keep_days=1.0)
    assert list(tmp_path.glob("*.part-*")) == parts  # they may be of a process on another host
    for path in (path for part in parts for path in (*part.iterdir(), part)):
        os.utime(path, (time.time() - 90_000,) * 2)
    cache.prune(keep_days=2.0)
    assert not list(tmp_path.glob("*.part-*"))
    assert len(list(cache.entries())) == 3


@pytest.mark.parametrize("name", ["0-1234abcd", "99999999-1234abcd", "1234abcd5678"])
def test_prune_keeps_what_another_host_writes(name: str, tmp_path: Path) -> None:
    part = tmp_path / f"{'0' * 24}.part-{name}"
    part.mkdir()
    (part / "pooled.bin").write_bytes(b"half")
    os.utime(part, (0, 0))  # of a folder the time of its last new file, which is long ago
    FeatureCache(tmp_path).prune(keep_days=0.0)
    assert part.is_dir()
    os.utime(part / "pooled.bin", (0, 0))
    FeatureCache(tmp_path).prune()
    assert not part.exists()


def test_a_part_that_is_removed_while_it_is_written_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    cache, stored = feature_cache(), numbers()
    write = cache_module._write

    def interrupted(path: Path, data: Any) -> None:
        write(path, data)
        shutil.rmtree(path.parent)

    monkeypatch.setattr(cache_module, "_write", interrupted)
    assert cache.save(ENTRY, stored).tokens.equal(stored.tokens)
    assert "was removed while it was written: it is kept in memory" in capsys.readouterr().out
    assert load_features(ENTRY).tokens.equal(stored.tokens)


def test_pruning_keeps_the_most_recently_used_entries(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    stored = StoredFeatures(torch.ones(10, 4), torch.ones(10, 4), torch.arange(11))
    for number in range(3):
        cache.save({"entry": number}, stored)
        time.sleep(0.02)
    cache.load({"entry": 0})
    assert cache.prune(keep_bytes=2 * next(iter(cache.entries())).size + 10) > 0
    assert cache.load({"entry": 1}) is None
    assert cache.load({"entry": 0}) is not None
    cache.prune(keep_days=0.0)
    assert not list(cache.entries())


def test_longer_sequences_are_averaged_down_and_shorter_ones_are_kept() -> None:
    encoder, dataset = build("text"), some(missing=0.0)
    whole, few = encode(encoder, dataset), encode(encoder, dataset, max_tokens=3)
    before, after = whole.offsets.diff(), few.offsets.diff()
    assert torch.equal(after, before.clamp(max=3))
    torch.testing.assert_close(few.pooled, whole.pooled)


@pytest.mark.parametrize(("kind", "per_feature"), [("image", False), ("vector", True)])
def test_standardised_training_features_are_centred_and_of_one_length(
    kind: str, per_feature: bool
) -> None:
    stored = encode(build("text"), some(), Compute(progress=False))
    rows = torch.arange(40)
    scaled = measure(stored, rows, kind, with_tokens=True)(stored.take(rows))
    present = scaled.mask.any(1)
    for vectors in (scaled.pooled[present], scaled.tokens[scaled.mask]):
        assert vectors.mean(0).abs().max() < 1e-4
        assert vectors.square().sum(1).mean().sqrt() == pytest.approx(LENGTH, rel=1e-3)
        stds = vectors.std(0, correction=0)
        assert (stds.max() / stds.min() < 1.001) == per_feature
    assert scaled.pooled[~present].abs().max() == 0


def test_a_constant_feature_is_centred_and_no_number_overflows() -> None:
    columns = torch.stack([torch.full((9,), 1e6), torch.arange(9.0), torch.zeros(9)], 1)
    scaled = Standardise.measure(columns, per_feature=True)
    whole = Features(columns[:, None], torch.ones(9, 1, dtype=torch.bool), columns)
    out = scaled(whole).pooled
    assert out.isfinite().all() and out[:, [0, 2]].abs().max() == 0
    assert out[:, 1].square().mean().sqrt() == pytest.approx(LENGTH)


# ---- samples that are kept prepared


def test_kept_samples_equal_those_of_a_loader_and_are_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = some(12).only("text")
    collate = Collate({"text": build("text").processor(train=True)})
    kept, reads = KeptSamples(dataset), []
    read = type(dataset).__getitem__
    monkeypatch.setattr(
        type(dataset), "__getitem__", lambda self, key: reads.append(key) or read(self, key)
    )
    keys = [(row, 1 + row) for row in range(12)]
    batches = [kept.batch(keys, collate, train=True) for _ in range(3)]
    assert len(reads) == 12
    expected = collate([dataset[key] for key in keys])
    for batch in batches:
        assert torch.equal(batch.present, expected.present) and batch.ids == expected.ids
        for name, tensor in expected.inputs["text"].items():
            assert torch.equal(batch.inputs["text"][name], tensor)


def test_augmented_samples_are_prepared_anew_in_every_epoch() -> None:
    dataset = some(6, missing=0.0).only("image")
    settings = {**SCRATCH["image"][1], "augment": "crop_flip"}
    encoder = create_encoder("image", SCRATCH["image"][0], **settings)
    kept = KeptSamples(dataset)
    train, val = (Collate({"image": encoder.processor(train=x)}) for x in (True, False))
    first, second = (
        kept.batch([(row, seed + row) for row in range(6)], train, True) for seed in (1, 99)
    )
    assert not torch.equal(first.inputs["image"]["pixels"], second.inputs["image"]["pixels"])
    plain = [kept.batch([(row, 0) for row in range(6)], val, False) for _ in range(2)]
    assert torch.equal(plain[0].inputs["image"]["pixels"], plain[1].inputs["image"]["pixels"])
