"""The registry: names, facts and families of components, and folders in which they are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fusionzoo
from fusionzoo.cli import main
from fusionzoo.datasets import DATASETS, READERS, DatasetEntry, PairedDataset
from fusionzoo.datasets.base import from_memory
from fusionzoo.encoders import ENCODERS, Encoder, EncoderEntry
from fusionzoo.encoders.vector import VectorIdentity
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import METRICS
from fusionzoo.fusion import FUSIONS, Fusion, FusionEntry
from fusionzoo.ground.registry import Entry, Registry
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.build import choose_encoders
from fusionzoo.training.tasks import OBJECTIVES
from fusionzoo.zoo.cards import BALANCE_FAMILIES, FAMILIES

REGISTRIES: dict[str, tuple[Registry[Any, Any], str]] = {  # a registry, and a word near a family
    "fusion": (FUSIONS, "erly"),
    "encoder": (ENCODERS, "imag"),
    "data set": (DATASETS, "builtin"),
    "training strategy": (BALANCE, "gradients"),
    "objective": (OBJECTIVES, "objectives"),
    "metric": (METRICS, "regresion"),
    "kind of table": (READERS, "texts"),
}


def fusions() -> Registry[Fusion, FusionEntry]:
    return Registry("fusion", "a list", FusionEntry, ("early", "late"), base=Fusion)


@pytest.mark.parametrize("noun", REGISTRIES)
def test_every_entry_has_a_family_of_its_registry_and_a_summary(noun: str) -> None:
    registry, _ = REGISTRIES[noun]
    assert registry.noun == noun
    assert len(registry) > 0
    for name in registry:
        assert registry[name].family in registry.families, name
        assert registry[name].summary, name


@pytest.mark.parametrize("noun", REGISTRIES)
def test_an_unknown_family_is_one_line_that_names_the_nearest(noun: str) -> None:
    registry, word = REGISTRIES[noun]
    before = list(registry)
    with pytest.raises(FusionZooError, match=f"{noun} 'mine': unknown family '{word}'. Did you"):
        registry.register("mine", family=word)(object)
    with pytest.raises(FusionZooError, match=r"'mine': family= is missing\. There are: "):
        registry.register("mine")(object)
    assert list(registry) == before


def test_the_families_that_are_shown_are_those_of_the_registries() -> None:
    assert FUSIONS.families == FAMILIES
    assert BALANCE.families == tuple(BALANCE_FAMILIES)


def test_names_are_listed_by_pattern_or_family() -> None:
    registry = fusions()
    for name, family in (("mbt", "early"), ("mult", "late"), ("late", "early")):
        registry.register(name, family=family)(type(name, (Fusion,), {}))
    assert registry.names("m*") == ["mbt", "mult"]
    assert registry.names("m*", "late") == registry.names("late") == ["mult"]  # not the fusion
    assert registry.names("[l]ate") == ["late"]
    assert registry.names("M*") == registry.names("early", "late") == []
    assert fusionzoo.list_fusions(family="late") == fusionzoo.list_fusions("late")
    assert fusionzoo.list_datasets("d*") == ["digits"]
    assert fusionzoo.list_encoders("tab*", kind="text") == []
    assert fusionzoo.list_encoders("hf/no*") == fusionzoo.list_encoders("no/*") == []
    assert "torchvision-video/r3d_18" in fusionzoo.list_encoders("torchvision-video/r*")
    assert set(fusionzoo.list_encoders("t*", kind="image")) >= {"timm/*", "torchvision/*"}


def test_an_entry_holds_the_facts_of_its_kind_alone() -> None:
    shared = {"name", "cls", "summary", "family", "paper", "hidden"}
    assert set(Entry.__dataclass_fields__) == shared
    of_fusions = {"reads", "synergy", "at_least", "linear_skip"}
    assert set(FusionEntry.__dataclass_fields__) - shared == of_fusions
    assert set(EncoderEntry.__dataclass_fields__) - shared == {"takes_model"}
    assert set(DatasetEntry.__dataclass_fields__) - shared == {"fetch"}
    with pytest.raises(FusionZooError, match=r"an unknown fact synergy=\. Known: family, paper, "):
        ENCODERS.register("mine", family="text", synergy=True)(object)
    with pytest.raises(FusionZooError, match=r"an unknown fact raeds=\. Did you mean 'reads'"):
        FUSIONS.register("mine", family="early", raeds="pooled")(object)
    with pytest.raises(FusionZooError, match="reads='rows' is neither 'pooled' nor 'tokens'"):
        FUSIONS.register("mine", family="early", reads="rows")(object)


def test_a_name_is_never_overwritten_but_a_definition_that_runs_again_replaces_itself() -> None:
    registry = fusions()

    def define() -> type[Fusion]:
        @registry.register("mine", family="early")
        class Mine(Fusion):
            pass

        return Mine

    define()
    second = define()  # as a notebook cell does
    assert registry["mine"].cls is second
    with pytest.raises(FusionZooError, match=r"'mine' is registered twice: by .*Mine and by .*"):
        registry.register("mine", family="early")(type("Other", (Fusion,), {}))
    assert registry["mine"].cls is second


def test_an_old_name_builds_the_new_entry_with_one_warning() -> None:
    registry = fusions()

    @registry.register("mine", family="early")
    class Mine(Fusion):
        pass

    registry.rename("my_own", "mine", removed_in="0.4")
    said = "fusion 'my_own' is now called 'mine'; fusionzoo 0.4 will not know the old name"
    with pytest.warns(FutureWarning, match=f"^{said}$") as warned:
        assert registry["my_own"] is registry["mine"]
        assert "my_own" in registry and registry.registered("my_own")
    assert len(warned) == 1
    assert list(registry) == registry.names("m*") == ["mine"]
    with pytest.raises(FusionZooError, match=r"unknown fusion 'mien'\. Did you mean 'mine'\?"):
        registry["mien"]
    with pytest.raises(FusionZooError, match="'my_own' is the old name of 'mine'"):
        registry.register("my_own", family="early")(type("Other", (Fusion,), {}))
    with pytest.raises(FusionZooError, match="'mine' cannot be renamed 'mine': 'mine' is in use"):
        registry.rename("mine", "mine", removed_in="0.4")
    with pytest.raises(FusionZooError, match="there is no 'yours'"):
        registry.rename("my_own", "yours", removed_in="0.4")


def test_a_saved_model_that_has_old_names_loads_and_is_saved_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in (FUSIONS, ENCODERS):
        monkeypatch.setattr(registry, "_renamed", {})
        monkeypatch.setattr(registry, "_warned", set())
    FUSIONS.rename("total", "sum", removed_in="0.4")
    ENCODERS.rename("letters", "chars", removed_in="0.4")
    ENCODERS.rename("pytorch-image-models", "timm", removed_in="0.4")
    encoders: dict[str, Any] = {
        "text": {"name": "chars", "dim": 8, "num_heads": 2, "num_layers": 1},
        "image": {"name": "timm/test_resnet", "pretrained": False},
    }
    fusionzoo.create_model("sum", encoders, 2).save(tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    text = config.read_text()
    old = text.replace('"sum"', '"total"').replace('"chars"', '"letters"')
    (tmp_path / "a" / "digests.json").unlink()
    config.write_text(old.replace('"timm/', '"pytorch-image-models/'))
    with pytest.warns(FutureWarning) as warned:
        fusionzoo.load(tmp_path / "a").save(tmp_path / "b")
    assert len(warned) == 3
    assert (tmp_path / "b" / "config.json").read_text() == text


def test_an_encoder_says_at_registration_that_a_models_name_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ENCODERS, "_entries", dict(ENCODERS._entries))

    @ENCODERS.register("zoo", family="vector", takes_model=True)
    class Library(Encoder):
        dim = 3

        def __init__(self, model: str) -> None:
            super().__init__()
            self.model = model

    @ENCODERS.register("zoo/plain", family="vector")
    class Plain(Encoder):
        dim = 4

    found = fusionzoo.create_encoder("table", "zoo/a/model", kind="vector")
    assert isinstance(found, Library)
    assert (found.model, found.kind) == ("a/model", "vector")
    assert isinstance(fusionzoo.create_encoder("table", "zoo/plain", kind="vector"), Plain)
    assert {"zoo/*", "zoo/plain"} <= set(fusionzoo.list_encoders("vector"))
    with pytest.raises(FusionZooError, match=r"unknown encoder 'zoo'\. Did you mean 'zoo/\*'"):
        fusionzoo.create_encoder("table", "zoo", kind="vector")
    with pytest.raises(FusionZooError, match="unknown encoder 'chars/x'"):
        fusionzoo.create_encoder("text", "chars/x")


def test_the_width_of_vectors_is_filled_in_whatever_the_encoder_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ENCODERS, "_entries", dict(ENCODERS._entries))

    @ENCODERS.register("mine", family="vector")
    class Mine(VectorIdentity):
        """Mine."""

    @ENCODERS.register("vector/fixed", family="vector")
    class Fixed(Encoder):
        """Of one width."""

        def __init__(self, *, width: int = 3) -> None:
            super().__init__()

    data = fusionzoo.create_dataset([{"vector": [1.0, 2.0, 3.0], "target": "a"}] * 3)
    for name, settings in (("mine", {"in_dim": 3}), ("vector/fixed", {})):
        assert choose_encoders(data, {"vector": {"name": name}})["vector"] == {
            "name": name,
            **settings,
        }


def test_data_fetch_lists_what_can_be_downloaded_and_calls_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DATASETS, "_entries", {name: DATASETS[name] for name in DATASETS})
    folders = []

    def fetch(folder: Path | None) -> Path:
        folders.append(folder)
        return tmp_path / "there"

    @DATASETS.register("remote", family="built-in", fetch=fetch)
    def remote() -> PairedDataset:
        """Something far away."""
        raise NotImplementedError

    assert main(["data", "fetch"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("remote", "stamps", "mfeat"))
    assert "digits" not in shown
    assert main(["data", "fetch", "remote", "--root", str(tmp_path)]) == 0
    assert main(["data", "fetch", "remote"]) == 0
    assert folders == [tmp_path, None]
    assert str(tmp_path / "there") in capsys.readouterr().out
    assert main(["data", "fetch", "digits"]) == 2
    assert "'digits' is not downloaded; those that are:" in capsys.readouterr().err
    assert main(["data", "fetch", "remot"]) == 2
    assert "Did you mean 'remote'?" in capsys.readouterr().err


def test_a_data_set_that_declares_no_setting_takes_those_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DATASETS, "_entries", {name: DATASETS[name] for name in DATASETS})

    @DATASETS.register("plain", family="built-in")
    def plain() -> PairedDataset:
        """Letters and numbers."""
        rows = range(20)
        return from_memory(
            {"text": [f"row {row}" for row in rows], "other": ["word"] * 20},
            {"text": "text", "other": "text"},
            ids=[str(row) for row in rows],
            splits=["train"] * 20,
            target=["x", "y"] * 10,
        )

    assert {"on_error", "max_errors", "missing"} <= DATASETS["plain"].parameters.keys()
    opened = DATASETS.create("plain", missing=0.5, on_error="skip")
    assert opened.on_error == "skip"
    assert not opened.present.all()
    assert list(DATASETS.create("plain", modalities="text").modalities) == ["text"]
    with pytest.raises(FusionZooError, match=r"no setting 'mising'.* Did you mean 'missing'"):
        DATASETS.create("plain", mising=0.5)
    with pytest.raises(FusionZooError, match="max_errors=2; it is a share"):
        DATASETS.create("plain", max_errors=2)
