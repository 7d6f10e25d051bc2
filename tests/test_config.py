"""Settings: what the command line and the files say, and what happens when they say it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionzoo.config import (
    BenchmarkConfig,
    EmbedConfig,
    OptimConfig,
    RunConfig,
    from_args,
    from_settings,
    from_tree,
    merge,
    parse_flags,
    read_yaml,
    write_yaml,
)
from fusionzoo.config.schema import OBJECTIVE_WORDS
from fusionzoo.errors import FusionZooError
from fusionzoo.training.tasks import OBJECTIVES


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("optim: {lr: 1e-4, clip: 2.0}\nfusion: {name: mbt, num_layers: 3}\n")
    cfg = from_args(RunConfig, ["--config", str(recipe), "--optim.clip", "3"])
    assert (cfg.optim.lr, cfg.optim.clip, cfg.optim.name) == (1e-4, 3.0, "adamw")
    assert cfg.fusion == {"name": "mbt", "num_layers": 3}


def test_a_setting_of_an_objective_needs_no_section() -> None:
    settings = {x for name in OBJECTIVES for x in OBJECTIVES[name].parameters}
    assert settings == {*OBJECTIVE_WORDS}
    cfg = from_args(RunConfig, ["--objective.class_weights", "balanced"])
    assert from_args(RunConfig, ["--class_weights", "balanced"]) == cfg
    assert from_settings(RunConfig, {"class_weights": "balanced"}) == cfg
    cfg = from_settings(RunConfig, {"objective": "regression", "loss": "huber"})
    assert cfg.objective == {"name": "regression", "loss": "huber"}


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
        (["--lrr", "1"], "Did you mean '--optim.lr'?"),
        (["--class_weight", "balanced"], "Did you mean '--objective.class_weights'?"),
        (["--decimals", ","], "Did you mean '--data.decimal'?"),
        (["--gamma", "2"], "gamma is a setting of objective and of optim: put it into one"),
        (
            ["--loss", "mae", "--objective.loss", "mse"],
            "--loss mae and --objective.loss mse differ",
        ),
        (["--fusion", "3"], "--fusion holds settings: give --fusion.<setting> 3"),
        (["--optim.lr"], "--optim.lr true: it needs a value"),
        (["--train.epochs", "true"], "--train.epochs true: it needs a value"),
        (["--out"], "--out true: it needs a value"),
        (["--optim.lr", "1e999"], "--optim.lr inf: it must be a finite number"),
        (["--dist.timeout", "NaN"], "--dist.timeout nan: it must be a finite number"),
        (["--fusion.dropout", "-Infinity"], "--fusion.dropout -inf: it must be a finite number"),
        (["--optim.settings", "{eps: 1, eps: 2}"], "duplicate key 'eps'"),
        (["--optim", "adam"], "--optim is a group of settings"),
        (["epochs=3"], "expected a flag such as --train.epochs 5, found 'epochs=3'"),
        (["--config", "none.yaml"], "no configuration file none.yaml"),
        (["--config", "stampz"], "no recipe of that name. Did you mean 'stamps'?"),
        (["--config", "configs/benchmarks/mfet.yaml"], "Did you mean 'benchmarks/mfeat'?"),
        (["--resume"], "--resume needs --out"),
        (["--data.name", "a", "--data.name.b", "c"], "an earlier flag sets 'name' itself"),
        (["--data.languages", "[fr"], "cannot read the value '[fr'"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(args: list[str], says: str) -> None:
    with pytest.raises(FusionZooError) as caught:
        from_args(RunConfig, args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_are_read_as_a_user_means_them() -> None:
    flags = parse_flags(["--a.x=1e-4", "--a.y", "no", "--b", "--c", "[1, no]", "--d", "-1"])
    assert flags == {"a": {"x": 1e-4, "y": "no"}, "b": True, "c": [1, False], "d": -1}


def test_yaml_numbers_in_exponent_form_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim: {lr: 3e-4}\nfusion: {name: lmf, scale: 1e-2}\n")
    tree = read_yaml(tmp_path / "a.yaml")
    assert tree["fusion"]["scale"] == 0.01
    assert from_tree(RunConfig, tree).optim == OptimConfig(lr=3e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim: {lr: .nan}", "--optim.lr nan: it must be a finite number"),
        ("train:\n  epochs: yes", "--train.epochs true: it needs a value"),
        ("a:\n  lr: 1\n  b: 2\n  lr: 3", "line 4: duplicate key 'lr'; the first is in line 2"),
        ("optim: [", "a.yaml is not YAML"),
        ("[" * 2000, "a.yaml is not YAML: it is nested too deeply"),
        ("optim: {lr: infinity}", "--optim.lr inf: it must be a finite number"),
        ("train:\n  epochs: 1:30", "a.yaml, line 2: YAML reads 1:30 as a number to base 60"),
        ("seed: 010", "a.yaml, line 1: YAML reads 010 as a number to base 8"),
        ("out: &a [*a]", "a.yaml, line 1: an alias refers to its own value"),
        ("? [seed]\n: 1", "a.yaml is not YAML: a key must be text"),
        ("day: 2001-99-99", "a.yaml is not YAML: month must be in 1..12"),
        ("run: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("\ud800", "a.yaml cannot be read: 'utf-8' codec can't decode"),
        ("seed: " + "9" * 5000, "a.yaml is not YAML: Exceeds the limit"),
        ("- seed", "a.yaml must hold a mapping of settings"),
        ("--- {}\n--- {}", "expected a single document"),
        ("a: &a {lr: 1}\noptim: {<<: *a, <<: *a}", "a.yaml, line 2: duplicate key '<<'"),
        ("# " + "x" * 5_000_000, "a.yaml cannot be read: it has 5,000,002 bytes; at most"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(FusionZooError) as caught:
        from_args(RunConfig, ["--config", str(tmp_path / "a.yaml")])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_aliases_that_multiply_are_refused_before_they_do(tmp_path: Path) -> None:
    """Billion laughs: thirty lines that stand for 10^30 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(FusionZooError, match=r"a\.yaml, line 5: with its aliases replaced, it has"):
        read_yaml(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("base: &b {lr: 1}\noptim: *b\nother: *b")
    assert read_yaml(tmp_path / "a.yaml")["optim"] == {"lr": 1}


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    words = ["1e3", "695e0514", "yes", "12", "null", "0x1f", "2020-01-01", "1:30"]
    data = {"name": "manifest", "kinds": dict.fromkeys(words, "1e3"), "na": words, "x": 1e-4}
    write_yaml(RunConfig(data=data), tmp_path / "c.yaml")
    assert read_yaml(tmp_path / "c.yaml")["data"] == data
    (tmp_path / "d.yaml").write_text("1e3: 1e-4\nyes: '1e-4'\n")
    assert read_yaml(tmp_path / "d.yaml") == {"1e3": 1e-4, "yes": "1e-4"}


def test_names_of_columns_may_have_dots() -> None:
    flags = ["--data.kinds.home.dest", "none", "--targets.heart.disease", "regression"]
    flags += ["--kinds.Sepal.Length", "number cm", "--targets.age.name", "ordinal"]
    assert parse_flags(flags) == {
        "data": {"kinds": {"home.dest": "none"}},
        "kinds": {"Sepal.Length": "number cm"},
        "targets": {"heart.disease": "regression", "age": {"name": "ordinal"}},
    }


def test_a_boolean_flag_without_a_value_is_true() -> None:
    cfg = from_args(RunConfig, ["--train.compile", "--encoders.image.pretrained"])
    assert cfg.train.compile and cfg.encoders["image"]["pretrained"] is True
    assert from_tree(RunConfig, parse_flags(["--resume"])).resume is True


def test_a_component_without_settings_is_given_by_its_name(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("data: stamps\nfusion: {name: lmf, rank: 2}\nencoders: {text: chars}\n")
    flags = ["--encoders.image", "timm/resnet18", "--encoders.image.size", "64", "--fusion", "gmu"]
    cfg = from_args(RunConfig, ["--config", str(recipe), "--fusion.dim", "8", *flags])
    assert cfg.data == {"name": "stamps"}
    assert cfg.fusion == {"name": "gmu", "dim": 8}
    image = {"name": "timm/resnet18", "size": 64}
    assert cfg.encoders == {"text": {"name": "chars"}, "image": image}
    assert from_args(EmbedConfig, ["--data", "digits"]).data == {"name": "digits"}
    with pytest.raises(FusionZooError, match="--fusion holds settings"):
        from_args(BenchmarkConfig, ["--fusion", "gmu"])  # there it holds settings of all fusions


def test_a_recipe_is_found_by_its_name_and_a_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_args(RunConfig, ["--config", "stamps"]).data["name"] == "stamps"
    recipe = from_args(BenchmarkConfig, ["--config", "benchmarks/mfeat"])
    assert recipe.data["name"] == "mfeat"
    assert from_settings(BenchmarkConfig, {}, "benchmarks/mfeat") == recipe
    (tmp_path / "stamps").write_text("seed: 7")
    assert from_args(RunConfig, ["--config", "stamps"]).seed == 7
