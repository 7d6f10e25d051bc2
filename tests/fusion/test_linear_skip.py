"""`linear_skip`: a linear model beside any fusion, from which its training starts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import fusionzoo
from fusionzoo import create_fusion, create_model, fusion_info, list_fusions
from fusionzoo.benchmark import candidates
from fusionzoo.config import BenchmarkConfig, OptimConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import FusionOutput
from fusionzoo.testing import fusions
from fusionzoo.testing.runner import SUITES
from fusionzoo.training.freezing import _specific_to
from fusionzoo.training.optim import param_groups

CHECKS = SUITES["fusion"]().checks
KEPT = (  # of the contract, the checks that the option could break
    "a_state_dict_restores_it_exactly",
    "batch_mates_change_nothing",
    "every_parameter_is_registered_and_gets_a_gradient",
    "gradients_stay_finite_and_do_not_reach_what_is_absent",
    "its_loss_is_finite_whatever_is_missing",
    "its_phases_train_every_parameter",
    "the_content_of_a_missing_modality_changes_nothing",
    "the_order_of_its_modalities_does_not_matter",
)
JOINED = [  # fusions that join logits of several answers: the option is within each
    name
    for name in list_fusions()
    if fusion_info(name).cls.joins_linear  # type: ignore[attr-defined]
]
DIMS = {"image": 5, "text": 7, "audio": 3}


def skipping(name: str, **settings: object) -> Fusion:
    torch.manual_seed(0)
    fusion = create_fusion(name, DIMS, 8, 4, linear_skip=True, **settings).double().eval()
    assert fusion.linear_skip is not None
    for weights in fusion.linear_skip.parameters():
        torch.nn.init.normal_(weights)
    return fusion


def linear_model(fusion: Fusion, inputs: fusions.Inputs) -> Tensor:
    """Sum the products of weights and present vectors, by hand."""
    weights = {name: fusion.state_dict()[f"linear_skip.{name}.weight"] for name in DIMS}
    terms = [
        (inputs[name].pooled @ w.T) * inputs[name].mask.any(1)[:, None]
        for name, w in weights.items()
    ]
    return torch.stack(terms).sum(0)


@pytest.mark.parametrize("check", KEPT)
@pytest.mark.parametrize("name", list_fusions())
def test_the_contract_holds_with_it(check: str, name: str) -> None:
    CHECKS[check](fusions.maker(name, {"linear_skip": True}))


@pytest.mark.parametrize("name", ["lmf", "late_mean", pytest.param("mmin", marks=pytest.mark.slow)])
def test_it_compiles_and_exports(name: str) -> None:
    CHECKS["it_compiles_whole"](fusions.maker(name, {"linear_skip": True}))


LAST = ("drfuse", "mca", "multimodn")  # where it is within each answer, the last one is linear


@pytest.mark.parametrize("name", [x for x in list_fusions() if x not in JOINED or x in LAST])
def test_at_the_start_the_logits_are_those_of_the_linear_model(name: str) -> None:
    fusion, inputs = skipping(name), fusions.features(fusions.patterns(3))
    torch.testing.assert_close(fusion(inputs).logits, linear_model(fusion, inputs))


@pytest.mark.parametrize("name", ["late_mean", "late_poe", "qmf", "simmlm", "zorro", "mmdynamics"])
def test_at_the_start_a_modality_s_own_logits_are_its_linear_model(name: str) -> None:
    fusion, inputs = skipping(name), fusions.features(fusions.patterns(3))
    for modality, logits in fusion(inputs).unimodal.items():
        alone = fusions.features(fusions.patterns(3) & torch.tensor([m == modality for m in DIMS]))
        torch.testing.assert_close(logits, linear_model(fusion, alone))


def test_late_rules_join_the_linear_models_of_the_present_modalities() -> None:
    fusion, inputs = skipping("late_mean"), fusions.features(fusions.patterns(3)[:-1])
    expected = linear_model(fusion, inputs) / fusions.patterns(3)[:-1].sum(1, keepdim=True)
    torch.testing.assert_close(fusion(inputs).logits, expected)


@pytest.mark.parametrize("name", ["mbt", "gmu", "tmc", "i2moe"])
def test_embedding_and_weights_stay_those_of_the_fusion(name: str) -> None:
    fusion, inputs = skipping(name), fusions.features(fusions.patterns(3))
    torch.manual_seed(0)
    plain = create_fusion(name, DIMS, 8, 4).double().eval()(inputs)
    found: FusionOutput = fusion(inputs)
    torch.testing.assert_close(found.embedding, plain.embedding, rtol=0, atol=0)
    if name == "gmu":
        assert found.weights is not None
        torch.testing.assert_close(found.weights, plain.weights, rtol=0, atol=0)


def test_each_version_of_a_stacked_classifier_has_linear_layers_of_its_own() -> None:
    fusion, inputs = skipping("late_stacking"), fusions.features(fusions.full(4))
    logits = fusion(inputs).extra["fold_logits"]
    assert not torch.allclose(logits[:, :, 0], logits[:, :, 1])


@pytest.mark.parametrize("name", ["mvae_poe", "mmin", "multimodn", "mca", "dynmm"])
def test_losses_of_subsets_read_the_linear_layers_of_their_modalities_only(name: str) -> None:
    """Of a sample with one modality, every loss is as without the other linear layers."""
    fusion = skipping(name).train()
    inputs = fusions.features(torch.tensor([[True, False, False]] * 4))
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        phases = range(len(fusion.phases))
        losses += [[fusions.own_loss(fusion, fusion(inputs), phase) for phase in phases]]
        if isinstance(getattr(fusion, "draws", None), torch.nn.Module):
            fusion.draws.state[1] = 0  # type: ignore[union-attr, operator, index]
        for other in ("text", "audio"):
            torch.nn.init.zeros_(fusion.get_parameter(f"linear_skip.{other}.weight"))
    for before, after in zip(*losses, strict=True):
        torch.testing.assert_close(before, after)


def test_training_adds_it_where_it_helps_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"epochs": 1, "log": "none", "device": "cpu"}
    data = {"name": "interactions", "samples": 200}
    fusion: dict[str, Any] = {"name": "lmf", "dim": 8}
    run = fusionzoo.train(data, fusion=fusion, out=tmp_path / "a", **common)
    assert "lmf: trained with linear_skip" in capsys.readouterr().out
    stored = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert stored["fusion"] == {**fusion, "linear_skip": True}
    assert fusionzoo.load(run.folder).fusion.linear_skip is not None
    off = {**fusion, "linear_skip": False}
    plain = fusionzoo.train(data, fusion=off, out=tmp_path / "b", **common)
    assert plain.model.fusion.linear_skip is None
    # A run that began without the setting, before there was a default, goes on without it.
    del stored["fusion"]["linear_skip"]
    (tmp_path / "b" / "config.yaml").write_text(yaml.safe_dump({**stored, "out": None}))
    again = fusionzoo.train(data, out=tmp_path / "b", resume=True, epochs=2)
    assert again.model.fusion.linear_skip is None


def test_a_benchmark_adds_it_where_it_helps_unless_told_not_to() -> None:
    for name in list_fusions():
        helps = fusion_info(name).linear_skip
        assert candidates.settings_of(BenchmarkConfig(), name).get("linear_skip", False) == helps
    off = BenchmarkConfig(fusion={"dim": 8, "linear_skip": False})
    own = BenchmarkConfig(settings={"lmf": {"linear_skip": False}})
    for cfg in (off, own):
        assert candidates.settings_of(cfg, "lmf")["linear_skip"] is False
    assert "linear_skip" not in candidates.settings_of(BenchmarkConfig(), "alone:text")


def test_a_fusion_that_is_built_in_python_and_one_saved_without_the_setting_have_none() -> None:
    for name in (name for name in list_fusions() if fusion_info(name).linear_skip):
        assert create_fusion(name, DIMS, 8, 4).linear_skip is None


def small_model(fusion: str) -> FusionModel:
    encoders = {name: {"name": "vector/mlp", "in_dim": 3} for name in ("a", "b")}
    settings = {"name": fusion, "dim": 8, "linear_skip": True}
    kinds = dict.fromkeys(encoders, "vector")
    return create_model(settings, encoders, classes=["x", "y"], kinds=kinds)


def test_its_layers_learn_with_the_fusion_and_in_their_modality_s_turn() -> None:
    model = small_model("lmf")
    skip = model.fusion.linear_skip
    assert isinstance(skip, torch.nn.ModuleDict)
    cfg = OptimConfig(lr=1e-3, modality_lr={"a": 1e-4, "fusion": 1e-2})
    (rate,) = {
        group["lr"]
        for group in param_groups(model, torch.nn.ModuleDict(), cfg)
        for parameter in group["params"]
        if parameter is skip["a"].weight
    }
    assert rate == 1e-2
    own = _specific_to(model, {"a", "b"}, "a")
    assert any(p is skip["a"].weight for p in own)
    assert not any(p is skip["b"].weight for p in own)


def test_a_model_folder_keeps_it(tmp_path: Path) -> None:
    model = small_model("mlb").eval()
    torch.nn.init.normal_(model.fusion.get_parameter("linear_skip.a.weight"))
    loaded = fusionzoo.load(model.save(tmp_path))
    samples = [{"a": [1.0, 2.0, 3.0]}, {"b": [1.0, 0.0, 0.0]}]
    assert loaded.predict(samples) == model.predict(samples)
    first, second = (answer.probabilities for answer in loaded.predict(samples))
    assert first["x"] != pytest.approx(0.5)
    assert second["x"] == pytest.approx(0.5)


def test_a_copy_runs_its_own_layers() -> None:
    fusion, inputs = skipping("lmf"), fusions.features(fusions.full(4))
    for other in (copy.deepcopy(fusion), pickle.loads(pickle.dumps(fusion))):
        before = fusion(inputs).logits
        torch.testing.assert_close(other(inputs).logits, before, rtol=0, atol=0)
        torch.nn.init.zeros_(other.get_parameter("linear_skip.image.weight"))
        torch.testing.assert_close(fusion(inputs).logits, before, rtol=0, atol=0)
        assert not torch.allclose(other(inputs).logits, before)


class Answering(Fusion):
    """Answer by layers of one's own, `head` or named otherwise."""

    def __init__(self, layers: torch.nn.Module, name: str = "head") -> None:
        super().__init__(DIMS, 8, 4)
        self.add_module(name, layers)


def test_of_a_head_with_two_layers_only_that_of_the_logits_starts_at_zero() -> None:
    head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    Answering(head).add_linear_skip()  # type: ignore[abstract]
    assert head[0].weight.any() and head[0].bias.any()
    assert not (head[2].weight.any() or head[2].bias.any())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: Answering(torch.nn.Linear(8, 4), "answer").add_linear_skip(),  # type: ignore[abstract]
            "Answering has no layer head that could start at zero",
        ),
        (
            lambda: Answering(torch.nn.TransformerEncoderLayer(8, 2)).add_linear_skip(),  # type: ignore[abstract]
            "has layers within a TransformerEncoderLayer: name the one that gives its logits",
        ),
        (
            lambda: create_fusion("missing_tokens", DIMS, 8, 4, base="qmf", linear_skip=True),
            "missing_tokens does not add it to QMF",
        ),
        (lambda: create_fusion("gmu", DIMS, 8, 4, linear_skip="yes"), "linear_skip='yes'"),
        (lambda: create_fusion("gmu", DIMS, 8, 4, linear_skp=True), "Did you mean 'linear_skip'?"),
    ],
)
def test_what_it_cannot_do_is_one_clear_error(build: object, says: str) -> None:
    with pytest.raises(FusionZooError) as caught:
        build()  # type: ignore[operator]
    assert says in str(caught.value)
