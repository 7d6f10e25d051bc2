"""Augmentation in a run: resumed bit for bit, never cached, never in embedding or evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.benchmark.prepare import augmentation_notes
from fusionzoo.config import BenchmarkConfig, from_tree
from fusionzoo.datasets import create_dataset
from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.features.encode import describe, encode
from fusionzoo.training.report import Run
from helpers.trainings import PREEMPTED, preempt_at

DATA: dict[str, Any] = {"name": "digits", "samples": 50, "modalities": "text,audio"}
TEXT = {"name": "chars", "dim": 16, "num_layers": 1}
SETTINGS: dict[str, Any] = {
    "encoders": {"text": TEXT, "audio": {"name": "mel/stats", "rate": 8000, "num_mels": 20}},
    "fusion": {"name": "concat", "dim": 8, "hidden": []},
    "train": {"epochs": 2, "batch_size": 15},
    "log": "none",
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def run(out: Path, augment: Any = None, **more: Any) -> Run:
    data = DATA if augment is None else {**DATA, "augment": augment}
    return fusionzoo.train(config={**SETTINGS, "data": data, **more}, out=str(out))


def weights(result: Run) -> bytes:
    return (result.folder / "model" / "model.safetensors").read_bytes()


def test_a_run_stopped_within_an_epoch_resumes_to_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path / "whole", 0.8)
    said = capsys.readouterr().out
    assert "augmented in training: text 0.8 (drop, swap, typos); audio 0.8 (gain, noise" in said
    stopped = preempt_at(3, lambda: run(tmp_path / "parts", 0.8))
    assert stopped.exit_code == PREEMPTED
    resumed = fusionzoo.train(out=str(tmp_path / "parts"), resume=True)
    assert weights(resumed) == weights(whole)


def test_features_of_augmented_samples_are_not_cached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = {"text": {**TEXT, "freeze": "all"}}
    encoders = {**SETTINGS["encoders"], **frozen}
    run(tmp_path / "a", {"text": {"strength": 0.5}}, encoders=encoders)
    reason = "text: frozen, but encoded anew in every epoch: training crops or augments it"
    assert reason in capsys.readouterr().out
    train = {**SETTINGS["train"], "cache_frozen": "on"}
    with pytest.raises(FusionZooError, match='cache_frozen="on": text: training crops'):
        run(tmp_path / "b", {"text": 0.5}, encoders=encoders, train=train)


def test_embedding_of_an_augmented_run_is_plain_and_asking_for_more_is_refused(
    tmp_path: Path,
) -> None:
    result = run(tmp_path / "a", 0.8)
    out = tmp_path / "e.parquet"
    fusionzoo.embed(result, {"name": "digits", "samples": 50, "modalities": "text,audio"}, out=out)
    dataset = create_dataset(**DATA)
    import pyarrow.parquet as pq

    table = pq.read_table(out)
    order = {sample_id: row for row, sample_id in enumerate(table["id"].to_pylist())}
    fused = torch.tensor(table["fused"].to_pylist())
    direct = result.model.embed([dataset[row] for row in range(8)])["fused"]  # type: ignore[misc]
    rows = [order[dataset.ids[row]] for row in range(8)]
    torch.testing.assert_close(fused[rows], direct, rtol=1e-4, atol=1e-5)
    for use in (fusionzoo.evaluate, fusionzoo.predict):
        with pytest.raises(FusionZooError, match="augment=: only training augments"):
            use(result, {**DATA, "augment": 0.5})


def test_a_data_set_in_memory_is_augmented_too_without_settings_of_modalities_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**SETTINGS, "data": {"augment": {"text": 0.5}}}
    fusionzoo.train(create_dataset(**DATA), config=config, out=str(tmp_path / "a"), max_steps=1)
    assert "augmented in training: text 0.5" in capsys.readouterr().out
    run(tmp_path / "b", {"image": {"strength": 0.5}, "text": 0.5}, train={"max_steps": 1})
    said = capsys.readouterr().out
    assert "left out by --data.modalities: --data.augment.image" in said
    assert "augmented in training: text 0.5" in said


def test_cached_features_are_not_augmented_and_known_by_it() -> None:
    dataset = create_dataset("digits", samples=50)
    encoder = create_encoder("text", "chars", dim=16, num_layers=1)
    plain = describe(encoder, dataset)
    pooled = encode(encoder, dataset).pooled
    set_augmentation([("text", encoder)], 1.0)
    assert describe(encoder, dataset) != plain
    assert torch.equal(encode(encoder, dataset).pooled, pooled)


def test_a_benchmark_says_what_is_augmented_or_that_nothing_would_be() -> None:
    encoder = create_encoder("text", "chars", dim=16, num_layers=1)
    cfg = from_tree(BenchmarkConfig, {})
    assert augmentation_notes(cfg, {"text": encoder}) == []
    set_augmentation([("text", encoder)], 0.5)
    (note,) = augmentation_notes(cfg, {"text": encoder})
    assert "Augmented were the samples on which" in note
    encoder.spec = {**encoder.spec, "pretrained": True}
    with pytest.raises(FusionZooError, match="--mode finetune trains the encoders"):
        augmentation_notes(cfg, {"text": encoder})
    finetune = from_tree(BenchmarkConfig, {"mode": "finetune"})
    assert augmentation_notes(finetune, {"text": encoder})[0].startswith("Training samples were")
