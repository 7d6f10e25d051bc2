"""Every training strategy keeps the contract, and its checks catch what commonly goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusionzoo.cli import main
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.machine.distributed import World
from fusionzoo.structures import FusionOutput, StepContext
from fusionzoo.testing.checks import Checks
from fusionzoo.testing.strategies import (
    CHECKS,
    ShortRun,
    Strategy,
    assert_equal,
    learn,
    learn_in_two,
    strategy,
)
from fusionzoo.training.balance import BALANCE, Balance, LossTerm, StrategyInputs
from helpers.strategies import SETTINGS

SLOW = "two_processes_learn_what_one_does"
QUICK = [check for check in CHECKS if check != SLOW]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("teacher")
    ShortRun(None).objective.model.float().save(folder)
    return {"teachers": dict.fromkeys("abc", str(folder))}


def small(name: str, teachers: dict[str, Any]) -> Strategy:
    return Strategy(name, teachers if name == "umt" else SETTINGS.get(name, {}))


@pytest.mark.parametrize("check", QUICK)
@pytest.mark.parametrize("name", BALANCE)
def test_contract(check: str, name: str, teachers: dict[str, Any]) -> None:
    CHECKS[check](small(name, teachers))


@pytest.mark.slow
def test_two_processes_learn_what_one_does(teachers: dict[str, Any], tmp_path: Path) -> None:
    """As the check, for all of them, and the sound one below, in the same two processes."""
    strategies = [small(name, teachers) for name in BALANCE]
    strategies.append(strategy(f"{__file__}:Sound"))
    for rank, states in enumerate(learn_in_two(strategies, tmp_path)):
        for one, state in zip(strategies, states, strict=True):
            expected = learn(one, World())
            assert_equal(state, expected, f"{one.target}, process {rank}", tolerance=1e-6)


@pytest.mark.usefixtures("forget_plugins")
def test_another_process_finds_what_a_plugin_registers(tmp_path: Path) -> None:
    path = tmp_path / "own_plugin_strategy.py"
    path.write_text(
        "from fusionzoo.training.balance import BALANCE, Balance\n"
        "@BALANCE.register(family='loss')\n"
        "class Mine(Balance):\n"
        "    'Do nothing.'\n"
    )
    load_plugins(str(path))
    registered = Strategy("own_plugin_strategy")
    assert registered.reference == f"{path}:Mine"
    assert Strategy(registered.reference).cls is registered.cls
    assert Strategy("ogm_ge").reference == "ogm_ge"


class Sound(Balance):
    """Adds the squares of each modality's features; each mutant breaks a line of it."""

    def weight(self, context: StepContext) -> float | Tensor:
        return 0.1

    def values(self, context: StepContext, name: str) -> Tensor:
        x = context.features[name]
        return torch.where(x.mask.any(1)[:, None], x.pooled, 0).square().sum(1)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        return {
            f"squares/{name}": LossTerm(
                self.values(context, name), x.mask.any(1), self.weight(context)
            )
            for name, x in context.features.items()
        }


class NeverOff(Sound):
    def active(self, context: StepContext) -> bool:
        return True


class WithoutEffect(Sound):
    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        return {}


class GlobalNoise(Sound):
    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        for parameter in (p for parameters in encoders.values() for p in parameters):
            if parameter.grad is not None:
                parameter.grad += 0.01 * torch.randn_like(parameter)


class CountsOutsideOfItsState(Sound):
    calls = 0

    def weight(self, context: StepContext) -> float:
        self.calls += 1
        return 0.1 / self.calls


class ReadsWhatIsAbsent(Sound):
    def values(self, context: StepContext, name: str) -> Tensor:
        return context.features[name].pooled.square().sum(1)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        losses = super().extra_losses(context)
        return {n: x._replace(mask=torch.ones_like(x.mask)) for n, x in losses.items()}


class DividedByPresentRows(Sound):
    def values(self, context: StepContext, name: str) -> Tensor:
        present = context.features[name].mask.any(1)
        return super().values(context, name) + super().values(context, name).sum() / present.sum()

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        losses = super().extra_losses(context)
        return {n: x._replace(mask=torch.ones_like(x.mask)) for n, x in losses.items()}


class OfOnePrecision(Sound):
    def values(self, context: StepContext, name: str) -> Tensor:
        squares = context.features[name].pooled.square()
        summed = squares @ torch.ones(squares.shape[1], dtype=torch.float64)
        return summed.where(context.features[name].mask.any(1), 0)


class LeavesAHook(Sound):
    def __init__(self, inputs: StrategyInputs, **settings: Any) -> None:
        super().__init__(inputs, **settings)

        def double(module: nn.Module, arguments: Any, output: FusionOutput) -> FusionOutput:
            return output._replace(logits=2 * output.logits)

        inputs.model.fusion.register_forward_hook(double)


class RowsOfOneProcess(Sound):
    rows: Tensor

    def __init__(self, inputs: StrategyInputs, **settings: Any) -> None:
        super().__init__(inputs, **settings)
        self.register_buffer("rows", torch.ones(()))

    def weight(self, context: StepContext) -> Tensor:
        self.rows += len(context.rows)
        return 0.1 * self.rows.log()


CAUGHT_BY: dict[type[Balance], str] = {
    NeverOff: "switched_off_it_leaves_plain_training_as_it_is",
    WithoutEffect: "it_changes_what_is_learned",
    GlobalNoise: "it_draws_from_no_global_generator",
    CountsOutsideOfItsState: "a_checkpoint_restores_it",
    ReadsWhatIsAbsent: "the_content_of_a_missing_modality_changes_nothing",
    DividedByPresentRows: "any_missing_modalities_are_no_trouble",
    OfOnePrecision: "bfloat16_and_accumulation_stay_finite",
    LeavesAHook: "evaluation_and_the_saved_model_know_nothing_of_it",
    RowsOfOneProcess: SLOW,
}


def problem(check: str, cls: type[Balance]) -> str | None:
    target = strategy(f"{__file__}:{cls.__name__}")
    return dict(Checks({check: CHECKS[check]}).run(target))[check]


@pytest.mark.parametrize("check", QUICK)
def test_the_sound_one_passes(check: str) -> None:
    assert problem(check, Sound) is None


@pytest.mark.parametrize(
    ("mutant", "check"),
    [pytest.param(*pair, id=pair[0].__name__) for pair in CAUGHT_BY.items() if pair[1] != SLOW],
)
def test_the_broken_one_is_caught(mutant: type[Balance], check: str) -> None:
    assert problem(check, mutant)


def test_every_check_catches_something() -> None:
    assert set(CAUGHT_BY.values()) == set(CHECKS)


@pytest.mark.slow
def test_the_command_line_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "check", "--balance", f"{__file__}:RowsOfOneProcess"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  two processes learn what one does\n" in out
    assert "Found: AssertionError: process 0 of two: " in out
    assert "ok    a checkpoint restores it\n" in out
    assert f"{len(CHECKS) - 1} of {len(CHECKS)} checks passed" in out


def test_a_strategy_that_cannot_be_built_is_one_clear_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["zoo", "check", "--balance", "ogm"]) == 2
    assert "unknown training strategy 'ogm'" in capsys.readouterr().err
    assert main(["zoo", "check", "--balance", "umt"]) == 2
    assert "it needs teachers" in capsys.readouterr().err
