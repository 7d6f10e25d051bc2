"""Frozen encoders run once: the losses are those of a run that encodes in every epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusionzoo
from fusionzoo.config import RunConfig, from_args, write_yaml
from fusionzoo.datasets import PairedDataset, paired
from fusionzoo.datasets.base import from_memory
from fusionzoo.datasets.media.decode import decode
from fusionzoo.errors import FusionZooError
from fusionzoo.features import frozen as features_frozen
from fusionzoo.structures import Features
from fusionzoo.training.balance.modality_dropout import ModalityDropout
from fusionzoo.training.report import Run
from helpers.trainings import PREEMPTED, preempt_at, weights

SAMPLES = 40
ENCODERS: dict[str, Any] = {
    "image": {"name": "timm/test_resnet", "pretrained": False, "freeze": "all"},
    "text": {"name": "chars", "dim": 16, "num_layers": 1, "freeze": "all"},
    "vector": {"name": "vector/mlp", "dim": 8, "hidden": 8},
}
SETTINGS: dict[str, Any] = {
    "encoders": ENCODERS,
    "fusion": {"name": "concat", "dim": 16},
    "train": {"epochs": 2, "batch_size": 8},
    "log": "none",
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of the values that the data set decodes."""
    kinds: list[str] = []

    def counted(kind: str, value: Any, *options: Any) -> Any:
        kinds.append(kind)
        return decode(kind, value, *options)

    monkeypatch.setattr(paired, "decode", counted)
    yield kinds


def samples(missing: float = 0.3, **options: Any) -> PairedDataset:
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(0, 3, (SAMPLES,), generator=draw)
    shades = torch.rand(SAMPLES, 3, 40, 32, generator=draw) + target[:, None, None, None]
    pictures: list[Any] = list((85 * shades).to(torch.uint8))
    words = options.pop("words", "")
    for row in options.pop("damaged", ()):
        pictures[row] = torch.zeros(1)
    splits = ["train"] * 24 + ["val"] * 8 + ["test"] * 8
    dataset = from_memory(
        {
            "image": pictures,
            "text": [f"{words}sample {'very ' * (row % 5)}{target[row]}" for row in range(SAMPLES)],
            "vector": torch.randn(SAMPLES, 5, generator=draw),
        },
        {"image": "image", "text": "text", "vector": "vector"},
        ids=[str(row) for row in range(SAMPLES)],
        splits=splits,
        target=[str(x) for x in target.tolist()],
        **options,
    )
    return dataset.drop(missing) if missing else dataset


def run(out: Path, mode: str, data: PairedDataset | None = None, **settings: Any) -> Run:
    train = {**SETTINGS["train"], "cache_frozen": mode, **settings.pop("train", {})}
    tree = {**SETTINGS, **settings, "train": train, "out": str(out)}
    return fusionzoo.train(data if data is not None else samples(), **tree)


def losses(result: Run) -> Tensor:
    figures = [[event["train"]["loss"], event["val"]["loss"]] for event in result.history]
    return torch.tensor([*figures, [result.metrics["test"]["loss"]] * 2])


@pytest.mark.parametrize(
    "settings",
    [
        {"fusion": {"name": "concat", "dim": 16}},
        {"fusion": {"name": "mbt", "dim": 16}, "balance": "modality_dropout"},
        {"fusion": {"name": "mean", "dim": 16}, "balance": "mla"},
        {"fusion": {"name": "gmu", "dim": 16}, "train": {"amp": "bf16"}},
        {
            "fusion": {"name": "concat_transformer", "dim": 16},
            "train": {"num_workers": 1, "group_by": "length"},
        },
    ],
    ids=lambda settings: settings["fusion"]["name"],
)
def test_the_losses_are_those_without_the_cache(settings: dict[str, Any], tmp_path: Path) -> None:
    cached, plain = (run(tmp_path / mode, mode, **settings) for mode in ("on", "off"))
    torch.testing.assert_close(losses(cached), losses(plain), rtol=1e-3, atol=1e-4)
    assert cached.metrics["given_only"].keys() == plain.metrics["given_only"].keys()
    for name, head in plain.metrics["unimodal"].items():
        assert cached.metrics["unimodal"][name]["loss"] == pytest.approx(head["loss"], rel=1e-3)


def test_pictures_are_decoded_once_over_all_runs(
    tmp_path: Path, cache: Path, decoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = samples()
    there = int(data.present[:, 0].sum())
    run(tmp_path / "cold", "auto", data)
    assert decoded.count("image") == there
    assert len(list(cache.iterdir())) == 2
    assert "image, text: frozen, features of 40 samples encoded once in" in capsys.readouterr().out
    decoded.clear()
    run(tmp_path / "warm", "auto", data, fusion={"name": "gmu", "dim": 16}, preset="none")
    assert "image" not in decoded  # texts are, to count those that are cut
    once = int(data.present[:, 2].sum())
    assert once <= decoded.count("vector") < 1.5 * once  # not in every epoch
    assert "encoded before, and found" in capsys.readouterr().out


@pytest.mark.parametrize("fusion", ["concat", "mbt"])  # which reads pooled vectors, and tokens
def test_commands_read_the_features_of_a_training_on_the_same_samples(
    fusion: str, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = samples()
    folder = run(tmp_path / "a", "auto", data, fusion={"name": fusion, "dim": 16}).folder

    def use(name: str) -> tuple[dict[str, Any], Any, Any]:
        fusionzoo.embed(folder, data, out=tmp_path / name)
        answers = fusionzoo.predict(folder, data, split="test").to_pylist()
        vectors = fusionzoo.read_embeddings(tmp_path / name).vectors
        return fusionzoo.evaluate(folder, data), answers, vectors

    decoded.clear()
    metrics, answers, embeddings = use("stored.parquet")
    assert {*decoded} == {"text", "vector"}  # texts to count those that are cut
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "empty"))
    metrics_anew, answers_anew, embeddings_anew = use("anew.parquet")
    assert {*decoded} == {"image", "text", "vector"}
    assert metrics["loss"] == pytest.approx(metrics_anew["loss"], rel=1e-5)
    assert len(answers) == 8
    for row, anew in zip(answers, answers_anew, strict=True):
        assert row["id"] == anew["id"]
        assert row["p_0"] == pytest.approx(anew["p_0"], rel=1e-4)
    assert embeddings == pytest.approx(embeddings_anew, abs=1e-5)


@pytest.mark.parametrize("change", ["words", "weights"])
def test_features_of_other_samples_or_weights_are_not_read(
    change: str, tmp_path: Path, decoded: list[str]
) -> None:
    model = run(tmp_path / "a", "auto").model
    data = samples()
    if change == "words":
        data = samples(missing=0, words="other ")
    else:
        with torch.no_grad():
            for _, encoder in model.named_encoders():
                next(encoder.parameters()).add_(1)
    decoded.clear()
    fusionzoo.embed(model, data, out=tmp_path / "a.parquet")
    assert "text" in decoded


def test_the_saved_model_holds_the_encoders(tmp_path: Path) -> None:
    result = run(tmp_path / "a", "on")
    data = samples().split("test")
    batch = result.model.collate()([data[row] for row in range(len(data))])
    logits = result.model.eval()(batch).logits
    accuracy = (logits.argmax(1) == batch.target).float().mean().item()
    assert accuracy == pytest.approx(result.metrics["test"]["accuracy"])


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {"fusion": {"name": "mbt", "dim": 16}}
    whole = run(tmp_path / "whole", "on", **settings)
    stopped = preempt_at(4, lambda: run(tmp_path / "parts", "on", **settings))
    assert stopped.exit_code == PREEMPTED
    resumed = run(tmp_path / "parts", "on", **settings, resume=True)
    ours, theirs = weights(whole.folder), weights(resumed.folder)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_only_encoders_that_stay_frozen_and_are_not_augmented_are_cached(
    tmp_path: Path, decoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    image = {**ENCODERS["image"], "augment": "crop_flip"}
    result = run(tmp_path / "a", "auto", encoders={**ENCODERS, "image": image})
    said = capsys.readouterr().out
    assert "text: frozen, features of 40 samples" in said
    reason = "image: frozen, but encoded anew in every epoch: training crops or augments it"
    assert reason in said
    assert decoded.count("image") > 40
    assert result.metrics["test"]
    with pytest.raises(FusionZooError, match=r"image: training crops .* at random$"):
        run(tmp_path / "b", "on", encoders={**ENCODERS, "image": image}, train={"num_workers": 1})


UNFROZEN = {name: {**x, "freeze": "none"} for name, x in ENCODERS.items()}
FORBIDDEN: dict[str, dict[str, Any]] = {
    "reads what the encoders read": {"balance": "modality_dropout"},
    "no encoder is frozen": {"encoders": UNFROZEN},
    "cannot write to the cache": {},
}


@pytest.mark.parametrize("why", FORBIDDEN)
def test_what_forbids_the_cache_is_said_and_an_error_where_it_is_asked_for(
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ModalityDropout, "raw_inputs", True)
    if why == "cannot write to the cache":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "file"))
    assert run(tmp_path / "a", "auto", **FORBIDDEN[why]).metrics["test"]
    assert why in capsys.readouterr().out or why == "no encoder is frozen"
    assert not cache.exists()
    with pytest.raises(FusionZooError, match=why):
        run(tmp_path / "b", "on", **FORBIDDEN[why])


def test_an_edited_view_is_encoded_anew_as_it_is_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dark = samples().edited(darkened)
    edited = run(tmp_path / "a", "auto", dark)
    assert "encoded anew in every epoch: the data set is an edited view" in capsys.readouterr().out
    assert not losses(edited).equal(losses(run(tmp_path / "b", "off")))
    with pytest.raises(FusionZooError, match='cache_frozen="on": the data set is an edited view'):
        run(tmp_path / "c", "on", dark)


def darkened(sample: Any) -> Any:
    values = {
        name: x // 4 if name == "image" and x is not None else x
        for name, x in sample.values.items()
    }
    return sample._replace(values=values)


def test_a_single_pass_is_cached_only_where_asked(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = {"epochs": 5, "max_steps": 3}
    run(tmp_path / "a", "auto", train=single)
    assert not cache.exists()
    assert "image: frozen, but encoded anew in every epoch: the run" in capsys.readouterr().out
    run(tmp_path / "b", "on", train=single)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("policy", ["missing", "skip"])
def test_pictures_that_cannot_be_decoded_count_as_without_the_cache(
    policy: str, tmp_path: Path
) -> None:
    results = []
    for mode in ("on", "off"):
        data = samples(0.0, damaged=(1, 30), on_error=policy, max_errors=0.2)
        results.append(run(tmp_path / mode, mode, data))
        assert data.failures() == [("1", "image"), ("30", "image")]
    torch.testing.assert_close(losses(results[0]), losses(results[1]), rtol=1e-3, atol=1e-4)
    with pytest.raises(FusionZooError, match="sample '1', image"):
        run(tmp_path / "c", "auto", samples(0.0, damaged=(1,)))


def test_features_that_would_fill_the_machine_are_not_cached_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    monkeypatch.setattr(features_frozen, "_room", lambda folder: 1e3)
    run(tmp_path / "a", "auto", fusion={"name": "mbt", "dim": 16})
    assert "its features may take" in capsys.readouterr().out
    assert not cache.exists()
    run(tmp_path / "b", "on", fusion={"name": "mbt", "dim": 16})
    assert len(list(cache.iterdir())) == 2


def test_tokens_with_gaps_are_not_cached() -> None:
    caching = features_frozen.Caching(mode="on", with_tokens=True, passes=2)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    watch = features_frozen._Watch(caching, dim=4, num_samples=2)
    with pytest.raises(features_frozen.NotCacheable, match="gaps"):
        watch(Features(torch.zeros(2, 3, 4), mask, torch.zeros(2, 4)))
    watch(Features(torch.zeros(1, 3, 4), mask[1:], torch.zeros(1, 4)))


def test_yaml_switches_are_words(tmp_path: Path) -> None:
    for text, word in (("off", "off"), ("on", "on"), ("auto", "auto")):
        (tmp_path / "a.yaml").write_text(f"train:\n  cache_frozen: {text}\n")
        cfg = from_args(RunConfig, ["--config", str(tmp_path / "a.yaml")])
        assert cfg.train.cache_frozen == word
        write_yaml(cfg, tmp_path / "b.yaml")
        again = from_args(RunConfig, ["--config", str(tmp_path / "b.yaml")])
        assert again.train.cache_frozen == word


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_two_processes_learn_from_features_that_one_of_them_stored(
    mode: str, tmp_path: Path, cache: Path
) -> None:
    def last_losses(*flags: str) -> list[float]:
        out = tmp_path / f"run{len(flags)}"
        command = [sys.executable, "train.py", "--data.name", "digits", "--log", "none"]
        command += ["--encoders.image.freeze", "all", "--encoders.audio.freeze", "all"]
        command += ["--train.max_steps", "6", "--train.cache_frozen", mode, "--out", str(out)]
        root = Path(__file__).parents[2]
        done = subprocess.run([*command, *flags], cwd=root, env=os.environ, check=False)
        assert done.returncode == 0
        results = json.loads((out / "metrics.json").read_text())
        return [results[part]["loss"] for part in ("train", "val", "test")]

    two = last_losses("--dist.nproc", "2", "--train.batch_size", "16")
    assert cache.exists() == (mode == "on")
    assert two == pytest.approx(last_losses(), rel=1e-3)
