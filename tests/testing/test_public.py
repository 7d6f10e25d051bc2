"""The contracts in a plug-in author's own tests: `check_fusion` and its like."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from fusionzoo.datasets import PairedDataset, create_dataset
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion
from fusionzoo.structures import Features, FusionOutput
from fusionzoo.testing import (
    check_dataset,
    check_encoder,
    check_fusion,
    check_objective,
    check_strategy,
    fusions,
    parametrize_with_checks,
)
from fusionzoo.testing.checks import Checks
from fusionzoo.testing.runner import SUITES, Suite, main_check

pytest_plugins = "pytester"


class Summed(Fusion):
    """The sum of aligned vectors, those of absent modalities left out."""

    reads = "pooled"

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, scale: float = 1.0
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project, self.scale = self.align(), scale
        self.head = nn.Linear(dim, num_outputs)

    def vectors(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        return self.pooled(features)  # zeros where a modality is absent

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        aligned = torch.stack([self.project[m](x) for m, x in self.vectors(features).items()], 1)
        kept = aligned.masked_fill(~present[..., None], 0)
        embedding = self.or_null(kept.sum(1) * self.scale, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)


class Leaking(Summed):
    """What stands in the place of an absent modality moves the others."""

    def vectors(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        alone = {m: features[m].pooled for m in self.dims}
        return {m: x + sum(y.mean() for y in alone.values()) for m, x in alone.items()}


def thirty() -> PairedDataset:
    return create_dataset("interactions", samples=30)


def repeated() -> PairedDataset:
    return thirty().subset([*range(30), 0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of fusions that train or compile: they take seconds."""
    slow = ("compiles", "learn", "cost_more", "dropped")
    few = [name for name in fusions.CHECKS if not any(word in name for word in slow)]
    suite = SUITES["fusion"]()._replace(checks=Checks({x: fusions.CHECKS[x] for x in few}))
    monkeypatch.setitem(SUITES, "fusion", lambda: suite)


@pytest.mark.usefixtures("quick")
def test_a_fusion_that_keeps_the_contract_passes_by_class_and_by_name() -> None:
    check_fusion(Summed, scale=0.5)
    check_fusion("sum")
    check_fusion(f"{__file__}:Summed")


@pytest.mark.usefixtures("quick")
def test_a_broken_fusion_is_told_which_checks_fail_and_what_was_tried() -> None:
    with pytest.raises(AssertionError) as caught:
        check_fusion(Leaking)
    said = str(caught.value)
    assert ":Leaking fails " in said and " checks of a fusion:\n- " in said
    assert "\n- the content of a missing modality changes nothing\n  Tried: " in said
    assert "\n  Found: AssertionError: " in said
    assert "the same seed builds the same fusion" not in said


OWN = """
from fusionzoo.testing import parametrize_with_checks
@parametrize_with_checks({target!r}, checks={checks!r}, expected_failed_checks={expected!r})
def test_contract(check): check()
"""
FAILS, EXPECTED = "the_content_of_a_missing_modality_changes_nothing", "batch_mates_change_nothing"
PASSES, GUESS = "weights_are_shares_of_what_is_present", "the_same_seed_builds_the_same_fusion"


def test_three_lines_are_one_case_for_each_check(pytester: pytest.Pytester) -> None:
    expected = {EXPECTED: "by design", GUESS: "not tried"}
    checks, target = [FAILS, EXPECTED, PASSES, GUESS], f"{__file__}:Leaking"
    pytester.makepyfile(OWN.format(target=target, checks=checks, expected=expected))
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "-rfx")
    assert done.parseoutcomes() == {"passed": 1, "failed": 2, "xfailed": 1}
    done.stdout.fnmatch_lines_random(
        [
            f"FAILED *[[]{FAILS}[]]*",
            f"FAILED *[[]{GUESS}[]]*",
            "[[]XPASS(strict)[]] not tried",
            f"XFAIL *[[]{EXPECTED}[]] - by design",
        ]
    )
    assert len(parametrize_with_checks("sum").args[1]) == len(fusions.CHECKS)


def test_cases_have_the_names_of_their_targets_and_unknown_checks_are_errors() -> None:
    mark = parametrize_with_checks("sum", Summed, checks=["padding_changes_nothing"])
    ids = [case.id for case in mark.args[1]]
    assert ids == ["sum-padding_changes_nothing", "Summed-padding_changes_nothing"]
    with pytest.raises(FusionZooError, match=r"'padding_chang' of a fusion\. Did you mean 'padd"):
        parametrize_with_checks("sum", expected_failed_checks={"padding_chang": "?"})
    with pytest.raises(FusionZooError, match="kind='fusoin' is neither 'fusion' nor"):
        parametrize_with_checks("sum", kind="fusoin")


def test_a_wrong_setting_is_an_error_that_names_it() -> None:
    with pytest.raises(FusionZooError, match="'ranks'"):
        check_fusion("lmf", ranks=3)
    with pytest.raises(FusionZooError, match="no setting 'scael'"):
        check_fusion(Summed, scael=2)


def test_an_error_of_the_first_build_alone_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as that of a file which the first build finds locked, and the others do not."""

    def fails_once(_: object) -> None:
        raise OSError("the file is locked\nby another process")

    checks: Checks[object] = Checks({"it_is_sound": lambda _: None})
    monkeypatch.setitem(SUITES, "data", lambda: Suite(checks, lambda *_: object(), fails_once))
    assert main_check("mine", "data") == 1
    said = capsys.readouterr().out
    assert "ok    it is sound\n" in said
    assert "FAIL  it can be built\n" in said
    assert "Found: OSError: the file is locked\n" in said
    checks["it_is_sound"] = fails_once  # a check that reports it stands for it
    assert main_check("mine", "data") == 1
    assert "0 of 1 checks passed" in capsys.readouterr().out


def test_a_class_within_a_function_is_to_be_moved() -> None:
    class Inner(Summed):
        pass

    with pytest.raises(FusionZooError, match="Inner is defined inside of a function"):
        check_fusion(Inner)


def test_an_objective_is_held_to_its_contract() -> None:
    check_objective("regression")


@pytest.mark.slow
def test_data_sets_encoders_and_strategies_are_held_to_their_contracts() -> None:
    check_dataset(thirty)
    with pytest.raises(AssertionError, match="checks of a data set:\n- ids are unique"):
        check_dataset(repeated)
    check_encoder("chars", dim=8, num_heads=2, num_layers=1)
    check_strategy("modality_dropout", rate=0.3)


def test_importing_it_needs_neither_torch_nor_pytest() -> None:
    code = (
        "import sys; from fusionzoo.testing import check_fusion\n"
        "print([name for name in ('torch', 'pytest', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
