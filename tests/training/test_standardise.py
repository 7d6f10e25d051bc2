"""Features of encoders that stay frozen are standardised by the training split, in the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fusionzoo
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.base import from_memory
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.model.standardise import LENGTH, Moments, Standardise
from fusionzoo.structures import Batch
from fusionzoo.training import frozen
from fusionzoo.training.report import Run
from helpers.trainings import PREEMPTED, preempt_at, weights

SAMPLES, TRAIN = 60, 40
ENCODERS: dict[str, Any] = {
    "text": {"name": "chars", "dim": 16, "num_layers": 1, "freeze": "all"},
    "raw": {"name": "vector/identity", "in_dim": 4},
    "vector": {"name": "vector/mlp", "in_dim": 5, "dim": 8, "hidden": 8},
}
NAMES = ["text", "raw"]  # those that are standardised


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))


def samples(missing: float = 0.3) -> PairedDataset:
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(0, 3, (SAMPLES,), generator=draw)
    units = torch.tensor([1.0, 100.0, 1e-3, 0.0])  # of the columns, the last one constant
    dataset = from_memory(
        {
            "text": [f"sample {'very ' * (row % 5)}{target[row]}" for row in range(SAMPLES)],
            "raw": 7 + torch.randn(SAMPLES, 4, generator=draw) * units,
            "vector": torch.randn(SAMPLES, 5, generator=draw),
        },
        {"text": "text", "raw": "vector", "vector": "vector"},
        ids=[str(row) for row in range(SAMPLES)],
        splits=["train"] * TRAIN + ["val"] * 10 + ["test"] * 10,
        target=[str(x) for x in target.tolist()],
    )
    return dataset.drop(missing) if missing else dataset


def run(out: Path, **settings: Any) -> Run:
    train = {"epochs": 2, "batch_size": 8, **settings.pop("train", {})}
    fixed = {"fusion": {"name": "mbt", "dim": 16}, "encoders": ENCODERS, "log": "none"}
    tree = {**fixed, "device": "cpu", **settings, "train": train, "out": str(out)}
    return fusionzoo.train(samples(), **tree)


def batch_of(model: FusionModel, split: str) -> Batch:
    data = samples().split(split)
    batch: Batch = model.collate()([data[row] for row in range(len(data))])
    return batch


def standardised_model() -> FusionModel:
    """An untrained model of one frozen and one trained encoder; features of `a` are scaled."""
    torch.manual_seed(0)
    encoders = {
        "a": {"name": "vector/identity", "in_dim": 3},
        "b": {"name": "vector/mlp", "in_dim": 4, "dim": 6},
    }
    model = create_model({"name": "concat", "dim": 8}, encoders, classes=["x", "y"]).eval()
    measured = Standardise.measure(3 + 2 * torch.randn(20, 3), None, True)
    return model.complete(standardise={"a": measured})


@pytest.mark.parametrize("mode", ["on", "off"])
def test_training_features_of_frozen_encoders_are_centred_and_of_one_length(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run(tmp_path / "a", train={"cache_frozen": mode}).model.eval()
    assert list(model.standardise) == NAMES
    assert "text, raw: features standardised by the training split" in capsys.readouterr().out
    features = model.encode(batch_of(model, "train"))
    for name in NAMES:
        x = features[name]
        for rows in (x.pooled[x.mask.any(1)], x.tokens[x.mask]):
            assert len(rows) > 10
            torch.testing.assert_close(rows.mean(0), torch.zeros(rows.shape[1]), atol=1e-3, rtol=0)
            length = rows.square().sum(1).mean().sqrt().item()
            assert length == pytest.approx(LENGTH, rel=1e-3)
    # Columns of vectors each by its own std; the constant one is only centred.
    stds = features["raw"].pooled[features["raw"].mask.any(1)].std(0, correction=0)
    torch.testing.assert_close(
        stds, torch.tensor([1.0, 1, 1, 0]) * LENGTH / 3**0.5, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("method", ["zscore", "minmax"])
def test_each_feature_may_have_mean_0_and_std_1_or_lie_between_0_and_1(
    method: str, tmp_path: Path
) -> None:
    result = run(tmp_path / "a", train={"standardise": method})
    loaded = fusionzoo.load(tmp_path / "a").eval()
    for model in (result.model.eval(), loaded):
        x = model.encode(batch_of(model, "train"))["raw"]  # its last feature is constant
        rows = x.pooled[x.mask.any(1)]
        first, second = (
            (rows.mean(0), rows.std(0, correction=0))
            if method == "zscore"
            else (rows.amin(0), rows.amax(0))
        )
        torch.testing.assert_close(first, torch.zeros(4), atol=1e-4, rtol=0)
        torch.testing.assert_close(second, torch.tensor([1.0, 1, 1, 0]), atol=1e-4, rtol=0)


def test_a_saved_model_holds_the_statistics(tmp_path: Path) -> None:
    result = run(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "model" / "config.json").read_text())
    assert config["standardise"] == NAMES
    loaded = fusionzoo.load(tmp_path / "a")
    batch = batch_of(loaded, "test")
    accuracy = (loaded(batch).logits.argmax(1) == batch.target).float().mean().item()
    assert accuracy == pytest.approx(result.metrics["test"]["accuracy"])
    for name, value in result.model.standardise.state_dict().items():
        assert torch.equal(loaded.standardise.state_dict()[name], value)
    # Saved again, as loaded: tensors that share memory would be lost.
    again = fusionzoo.load(loaded.save(tmp_path / "b"))
    assert torch.equal(again(batch).logits, loaded(batch).logits)
    config["standardise"] = ["sound"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FusionZooError, match="standardise names 'sound', which has no encoder"):
        fusionzoo.load(tmp_path / "b")


def test_embed_returns_each_encoders_own_vectors_and_what_is_absent_stays_so() -> None:
    present = torch.tensor([[True, True], [False, True], [True, False]])
    inputs: Any = {"a": {"values": torch.randn(3, 3)}, "b": {"values": torch.randn(3, 4)}}
    model, batch = standardised_model(), Batch(["0", "1", "2"], inputs, present, None)
    model.complete(align={"a": nn.Linear(3, 5)})
    vectors, features = model.embed(batch), model.encode(batch)
    values = batch.inputs["a"]["values"]  # type: ignore[call-overload]
    assert torch.equal(vectors["a"], values * batch.present[:, :1])
    assert not torch.allclose(features["a"].pooled, vectors["a"])
    assert torch.equal(vectors["fused"], model.fusion(features).embedding)
    aligned = nn.functional.normalize(model.align["a"](features["a"].pooled))
    torch.testing.assert_close(vectors["aligned_a"], aligned * batch.present[:, :1])
    features = model.encode(batch)["a"]
    assert features.mask[:, 0].tolist() == [True, False, True]
    assert not features.pooled[1].any() and not features.tokens[1].any()
    logits = model(batch).logits
    batch.inputs["a"]["values"][1] = float("nan")  # type: ignore[call-overload, index]
    assert torch.equal(model(batch).logits, logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"standardise": "off"}},
        {"encoders": {"text": {**ENCODERS["text"], "freeze": "none"}, "raw": ENCODERS["vector"]}},
        {"optim": {"unfreeze_at_epoch": {"text": 1}}},
    ],
    ids=["off", "trained", "unfrozen later"],
)
def test_nothing_else_is_standardised(settings: dict[str, Any], tmp_path: Path) -> None:
    text = {**ENCODERS["text"], "freeze": "none"} if "optim" in settings else ENCODERS["text"]
    encoders = {**ENCODERS, "text": text, **settings.pop("encoders", {})}
    encoders["raw"] = {**encoders["raw"], "in_dim": 4}
    result = run(tmp_path / "a", **{**settings, "encoders": encoders})
    expected = ["raw"] if "optim" in settings else []
    assert list(result.model.standardise) == expected
    assert any("standardise" in name for name in weights(result.folder)) == bool(expected)


@pytest.mark.parametrize("before", ["auto", "off"])
def test_a_resumed_run_keeps_the_statistics_of_its_checkpoint(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train": {"standardise": before}}
    whole = run(tmp_path / "whole", **settings)
    stopped = preempt_at(6, lambda: run(tmp_path / "parts", **settings))
    assert stopped.exit_code == PREEMPTED
    measured: list[Any] = []
    monkeypatch.setattr(frozen, "_measure", measured.append)
    resumed = run(tmp_path / "parts", resume=True)  # with the default, auto
    assert not measured
    ours, theirs = weights(whole.folder), weights(resumed.folder)
    assert ours.keys() == theirs.keys()
    assert ("model.standardise.text.pooled_mean" in ours) == (before == "auto")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_at_most_so_many_samples_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "MAX_SAMPLES", 7)
    counts: list[int] = []
    merge = Moments.merge

    def counted(self: Moments, other: Moments) -> Moments:
        merged = merge(self, other)
        counts.append(merged.num_rows)
        return merged

    monkeypatch.setattr(Moments, "merge", counted)
    fusion = {"name": "concat", "dim": 8}
    raw, mean = (
        run(tmp_path / mode, fusion=fusion, train={"cache_frozen": mode}).model.standardise
        for mode in ("on", "off")
    )
    assert counts and counts[0] == 7
    for name, value in raw.state_dict().items():  # the same samples, cached or not
        torch.testing.assert_close(mean.state_dict()[name], value, rtol=1e-4, atol=1e-4)


def test_moments_of_parts_are_those_of_the_whole() -> None:
    rows = 1000 + torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    whole, parts = Moments.of(rows), Moments.of(rows[:0])
    for part in rows.split([1, 30, 0, 19]):
        parts = parts.merge(Moments.of(part))
    assert parts.num_rows == whole.num_rows == 50
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.variance, whole.variance, rtol=1e-4, atol=0)
    assert torch.equal(parts.low, rows.double().amin(0))
    assert torch.equal(parts.high, rows.double().amax(0))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_two_processes_measure_what_one_does(strategy: str, tmp_path: Path) -> None:
    def statistics(*flags: str) -> dict[str, Tensor]:
        out = tmp_path / f"run{len(flags)}"
        command = [sys.executable, "train.py", "--data.name", "digits", "--log", "none"]
        command += ["--data.samples", "200", "--fusion.name", "mbt", "--data.missing", "0.4"]
        command += ["--encoders.image.freeze", "all", "--encoders.audio.freeze", "all"]
        command += ["--train.max_steps", "2", "--train.cache_frozen", "off", "--out", str(out)]
        done = subprocess.run([*command, *flags], cwd=Path(__file__).parents[2], check=False)
        assert done.returncode == 0
        tensors = load_file(out / "model" / "model.safetensors")
        return {name: x for name, x in tensors.items() if name.startswith("standardise.")}

    alone = statistics()
    many = statistics("--dist.nproc", "2", "--dist.strategy", strategy, "--train.batch_size", "16")
    assert {name.split(".")[1] for name in alone} == {"image", "audio"}
    torch.testing.assert_close(many, alone, rtol=1e-4, atol=1e-5)
