"""Settings: what the command line and the files say, and what happens when they say it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionzoo.config import (
    OptimConfig,
    RunConfig,
    from_args,
    from_tree,
    merge,
    parse_flags,
    read_yaml,
    write_yaml,
)
from fusionzoo.errors import FusionZooError


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("optim: {lr: 1e-4, clip: 2.0}\nfusion: {name: mbt, num_layers: 3}\n")
    cfg = from_args(RunConfig, ["--config", str(recipe), "--optim.clip", "3"])
    assert (cfg.optim.lr, cfg.optim.clip, cfg.optim.name) == (1e-4, 3.0, "adamw")
    assert cfg.fusion == {"name": "mbt", "num_layers": 3}


def test_another_component_does_not_inherit_the_settings_of_the_first() -> None:
    assert merge({"fusion": {"name": "lmf", "rank": 4}}, {"fusion": {"name": "gmu"}}) == {
        "fusion": {"name": "gmu"}
    }
    assert merge({"fusion": {"name": "lmf", "rank": 4}}, {"fusion": {"dim": 8}}) == {
        "fusion": {"name": "lmf", "rank": 4, "dim": 8}
    }


def test_another_optimiser_loses_only_the_settings_of_the_first(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("optim: {name: adamw, lr: 2e-4, clip: 5, settings: {amsgrad: true}}\n")
    cfg = from_args(RunConfig, ["--config", str(recipe), "--optim.name", "lion"])
    assert (cfg.optim.name, cfg.optim.lr, cfg.optim.clip) == ("lion", 2e-4, 5.0)
    assert cfg.optim.settings == {}
    same = from_args(RunConfig, ["--config", str(recipe), "--optim.lr", "1"])
    assert same.optim.settings == {"amsgrad": True}


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    cfg = from_args(
        RunConfig, ["--optim.modality_lr.image", "1e-5", "--data.languages", "[fr, no]"]
    )
    write_yaml(cfg, tmp_path / "config.yaml")
    assert from_tree(RunConfig, read_yaml(tmp_path / "config.yaml")) == cfg


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--optim.lrr", "1"], "unknown setting --optim.lrr. Did you mean '--optim.lr'?"),
        (["--epochs", "3"], "Did you mean '--train.epochs'?"),
        (["--optm.lr", "1"], "Did you mean '--optim'?"),
        (["--optim.lr", "fast"], "--optim.lr 'fast': input should be a valid number"),
        (["--optim.lr", "-1"], "--optim.lr -1: input should be greater than 0"),
        (["--train.epochs", "0"], "--train.epochs 0: input should be greater than or equal to 1"),
        (["--train.amp", "int8"], "--train.amp 'int8': input should be 'none', 'bf16' or 'fp16'"),
        (["--fusion", "mbt"], "--fusion holds settings: give --fusion.<setting> mbt"),
        (["--optim", "adam"], "--optim is a group of settings"),
        (["epochs=3"], "expected a flag such as --train.epochs 5, found 'epochs=3'"),
        (["--config", "none.yaml"], "no configuration file none.yaml"),
        (["--resume"], "--resume needs --out"),
        (["--data.name", "a", "--data.name.b", "c"], "'name' was given a value of its own before"),
        (["--data.languages", "[fr"], "cannot read the value '[fr'"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(args: list[str], says: str) -> None:
    with pytest.raises(FusionZooError) as caught:
        from_args(RunConfig, args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) or "YAML" in str(caught.value) or "[fr" in says


def test_values_are_read_as_a_user_means_them() -> None:
    flags = parse_flags(["--a.x=1e-4", "--a.y", "no", "--b", "--c", "[1, no]", "--d", "-1"])
    assert flags == {"a": {"x": 1e-4, "y": "no"}, "b": True, "c": [1, False], "d": -1}


def test_yaml_numbers_in_exponent_form_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim: {lr: 3e-4}\nfusion: {name: lmf, scale: 1e-2}\n")
    tree = read_yaml(tmp_path / "a.yaml")
    assert tree["fusion"]["scale"] == 0.01
    assert from_tree(RunConfig, tree).optim == OptimConfig(lr=3e-4)
