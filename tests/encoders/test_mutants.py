"""The contract's checks catch what commonly goes wrong in an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusionzoo.cli import main
from fusionzoo.encoders import Encoder, Processor
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, masked_mean
from fusionzoo.testing.checks import Checks
from fusionzoo.testing.encoders import CHECKS, WIDTH, Maker, maker


class MaskedSteps(Processor):
    """Sequences, padded, with a mask."""

    def __call__(
        self, value: Tensor, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        if generator is not None:
            value = value + 0.1 * torch.randn(value.shape, generator=generator)
        return {"values": value}

    def blank(self) -> dict[str, Tensor]:
        return {"values": torch.zeros(1, WIDTH)}

    def collate(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(item["values"]) for item in items])
        values = super().collate(items)["values"]
        return {"values": values, "mask": torch.arange(values.shape[1]) < lengths[:, None]}


class Sound(Encoder):
    """A linear map of each step, then its mean; each mutant breaks a line of it."""

    kind, dim = "sequence", 4
    Steps = MaskedSteps

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 4)

    def processor(self, train: bool) -> Processor:
        return self.Steps()

    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        return values.masked_fill(~mask[..., None], 0)

    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return masked_mean(tokens, mask)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        mask = inputs["mask"]
        tokens = self.project(self.clean(inputs["values"], mask))
        return Features(tokens, mask, self.pool(tokens, mask))


class OfAnotherWidth(Sound):
    dim = 5


class FloatMask(Sound):
    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        out = super().encode(inputs)
        return out._replace(mask=out.mask.float())


class PaddingCounted(Sound):
    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return tokens.mean(1)


class PaddingInTheMask(Sound):
    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        out = super().encode(inputs)
        return out._replace(mask=torch.ones_like(out.mask))


class MaskByMultiplication(Sound):
    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        return values * mask[..., None]

    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class CentredByTheBatch(Sound):
    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        pooled = masked_mean(tokens, mask)
        return pooled - 0.5 * pooled.mean(0)


class EmptyBlank(Sound):
    class Steps(MaskedSteps):
        def blank(self) -> dict[str, Tensor]:
            return {"values": torch.zeros(0, WIDTH)}

    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class ProcessorWithAFunction(Sound):
    class Steps(MaskedSteps):
        def __init__(self) -> None:
            self.scale = lambda value: value


class GlobalAugmentation(Sound):
    class Steps(MaskedSteps):
        def __call__(
            self, value: Tensor, generator: torch.Generator | None = None
        ) -> dict[str, Tensor]:
            return {"values": value + (0.0 if generator is None else torch.randn(value.shape))}


class SilentAugmentation(Sound):
    class Steps(MaskedSteps):
        def __call__(
            self, value: Tensor, generator: torch.Generator | None = None
        ) -> dict[str, Tensor]:
            scale = 1.0 if generator is None else torch.rand(1, generator=generator)
            return {"values": value * scale}

        def varies(self, value: Tensor) -> bool:
            return False


class UnsavedDirection(Sound):
    """Drawn when it is built, and in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = torch.randn(4)

    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return masked_mean(tokens, mask) * self.direction


class ScalesInAList(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.ones(4, requires_grad=True)]

    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return masked_mean(tokens, mask) * self.scales[0]


class UnusedLayer(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class AnotherBuildEachTime(Sound):
    builds = count()

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.project.bias, float(next(self.builds)))


class StillMoving(Sound):
    """Counts its calls, frozen or not."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        self.calls += 1
        return super().encode(inputs)


class ScaledByItsSteps(Sound):
    """A number that training moves, in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def pool(self, tokens: Tensor, mask: Tensor) -> Tensor:
        self.scale *= 0.9 if self.training else 1.0
        return masked_mean(tokens, mask) * self.scale


class NeverFrozen(Sound):
    def freeze(self, mode: str = "all") -> None:
        """Forget to."""


class AlwaysSingle(Sound):
    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        return super().clean(values, mask).float()


CAUGHT_BY = {
    OfAnotherWidth: "shapes_and_dtypes_are_those_of_features",
    FloatMask: "shapes_and_dtypes_are_those_of_features",
    PaddingCounted: "padding_changes_nothing",
    PaddingInTheMask: "padding_changes_nothing",
    MaskByMultiplication: "the_content_of_masked_inputs_changes_nothing",
    CentredByTheBatch: "batch_mates_change_nothing",
    EmptyBlank: "the_blank_sample_works",
    ProcessorWithAFunction: "the_processor_pickles",
    GlobalAugmentation: "augmentation_draws_from_its_generator_alone",
    SilentAugmentation: "a_value_that_does_not_vary_is_prepared_alike_in_training",
    UnsavedDirection: "assets_and_weights_rebuild_it",
    ScalesInAList: "every_parameter_is_registered_and_gets_a_gradient",
    UnusedLayer: "every_parameter_is_registered_and_gets_a_gradient",
    AnotherBuildEachTime: "the_same_seed_builds_the_same_encoder",
    ScaledByItsSteps: "a_trained_model_answers_alike_once_it_is_loaded",
    StillMoving: "a_frozen_encoder_stays_as_it_is",
    NeverFrozen: "a_frozen_encoder_stays_as_it_is",
    AlwaysSingle: "float64_and_bfloat16_are_near_float32",
}


def made(cls: type[Encoder]) -> Maker:
    return maker(f"{__file__}:{cls.__name__}")


def test_the_sound_one_passes() -> None:
    assert [x for x in CHECKS.run(made(Sound)) if x[1]] == []


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_broken_one_is_caught(mutant: type[Encoder]) -> None:
    check = CAUGHT_BY[mutant]
    problems = dict(Checks({check: CHECKS[check]}).run(made(mutant)))
    assert problems[check]


def test_every_check_catches_something() -> None:
    assert set(CAUGHT_BY.values()) == set(CHECKS)


def test_the_command_line_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "check", "--encoder", f"{__file__}:PaddingCounted"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  padding changes nothing\n" in out
    assert "Found: AssertionError: a value of shape (3, 5), alone and in a batch: pooled" in out
    assert main(["zoo", "check", "--encoder", "chars", "--set", "dim=16", "num_layers=1"]) == 0
    assert f"chars: {len(CHECKS)} of {len(CHECKS)} checks passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("cahrs", "unknown encoder 'cahrs'. Did you mean 'chars'?"),
        ("hf/nothing", "set kind="),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("nowhere.py:Mine", "plugin nowhere.py: there is no file"),
    ],
)
def test_a_target_that_is_not_there_is_one_clear_error(
    target: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["zoo", "check", "--encoder", target]) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(FusionZooError):
        maker(target)()
