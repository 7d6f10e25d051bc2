"""The contract's checks catch what commonly goes wrong in a fusion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from fusionzoo.fusion import Fusion
from fusionzoo.fusion.attention.mbt import MBT
from fusionzoo.fusion.base import masked_softmax
from fusionzoo.fusion.early.mlb import MLB
from fusionzoo.fusion.late.tmc import TMC
from fusionzoo.structures import Features, FusionOutput, masked_mean
from fusionzoo.testing import fusions
from fusionzoo.testing.runner import SUITES, main_check
from helpers.oracle import dempster


class Sound(Fusion):
    """Mean of aligned, pooled tokens with softmax weights; each mutant breaks a line of it."""

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.score = nn.Linear(dim, 1)
        self.head = nn.Linear(dim, num_outputs)

    def means(self, features: Mapping[str, Features]) -> list[Tensor]:
        return [masked_mean(features[m].tokens, features[m].mask) for m in self.dims]

    def names(self, features: Mapping[str, Features]) -> list[str]:
        return list(self.dims)

    def weigh(self, scores: Tensor, present: Tensor) -> Tensor:
        return masked_softmax(scores, present)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        pooled = self.means(features)
        names = self.names(features)
        aligned = torch.stack([self.project[m](x) for m, x in zip(names, pooled, strict=True)], 1)
        aligned = aligned.masked_fill(~present[..., None], 0)
        weights = self.weigh(self.score(aligned)[..., 0], present)
        embedding = self.or_null((weights[..., None] * aligned).sum(1), present)
        return FusionOutput(embedding, self.head(embedding.tanh()), {}, weights)


class FactorsInAList(Sound):
    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.factors = [torch.randn(dim, requires_grad=True) for _ in dims]

    def weigh(self, scores: Tensor, present: Tensor) -> Tensor:
        scale = torch.stack([f.sum() for f in self.factors]).to(scores.dtype)
        return masked_softmax(scores * scale, present)


class MeanDividedByM(Sound):
    def weigh(self, scores: Tensor, present: Tensor) -> Tensor:
        return masked_softmax(scores, present) * present.sum(1, keepdim=True) / present.shape[1]


class MaskByMultiplication(Sound):
    def means(self, features: Mapping[str, Features]) -> list[Tensor]:
        found = (features[m] for m in self.dims)
        return [
            (x.tokens * x.mask[..., None]).sum(1) / x.mask.sum(1, keepdim=True).clamp(min=1)
            for x in found
        ]


class SoftmaxOverTheBatch(Sound):
    def weigh(self, scores: Tensor, present: Tensor) -> Tensor:
        return masked_softmax(scores, present, dim=0)


class PaddingCounted(Sound):
    def means(self, features: Mapping[str, Features]) -> list[Tensor]:
        return [x.mean(1) for x in self.tokens(features).values()]


class MissingAttendedTo(Sound):
    def weigh(self, scores: Tensor, present: Tensor) -> Tensor:
        return scores.softmax(1)


class OrderOfTheDict(Sound):
    def names(self, features: Mapping[str, Features]) -> list[str]:
        return list(features)

    def means(self, features: Mapping[str, Features]) -> list[Tensor]:
        return [masked_mean(x.tokens, x.mask) for x in features.values()]


class SumOfVotes(Sound):
    """Sound, but deaf to one modality."""

    def means(self, features: Mapping[str, Features]) -> list[Tensor]:
        first, *others = super().means(features)
        return [first, *(x * 0 for x in others)]


class BatchStatistics(Sound):
    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        out = super().forward(features)
        return out._replace(logits=out.logits - out.logits.mean(0))


class SequentialBottleneck(MBT):
    """Lets each modality read what the one before it just wrote into the bottleneck."""

    def _fuse(
        self,
        layer: int,
        tokens: dict[str, Tensor],
        masks: dict[str, Tensor],
        z: Tensor,
        present: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:
        new = {}
        for column, (name, x) in enumerate(tokens.items()):
            mask = nn.functional.pad(masks[name], (0, z.shape[1]), value=True)
            both = self.streams[name][layer](torch.cat([x, z], dim=1), mask)
            new[name], own = both.split([x.shape[1], z.shape[1]], dim=1)
            z = torch.where(present[:, column, None, None], own, z)
        return new, z


class PairwiseDempster(TMC):
    """Combines evidence two by two, which divides 0 by 0 once both are sure and disagree."""

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        evidence = nn.functional.softplus(unimodal).masked_fill(~present[..., None], 0)
        joined = reduce(dempster, evidence.unbind(1))
        logits, extra = joined.log1p(), {"views": evidence, "joined": joined}
        return self.output(embedding, logits, unimodal, present, None, **extra)


MUTANTS: list[Callable[..., Fusion]] = [
    FactorsInAList,
    MeanDividedByM,
    MaskByMultiplication,
    SoftmaxOverTheBatch,
    PaddingCounted,
    MissingAttendedTo,
    OrderOfTheDict,
    SumOfVotes,
    BatchStatistics,
    SequentialBottleneck,
    PairwiseDempster,
]


class FactorOfOne(MLB):
    """Multiplies only what is there, which the weights behind the product have never met."""

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        factors = self.factors(self.pooled(features)).tanh()
        factors = factors.masked_fill(~present[..., None], 1)
        embedding = self.or_null(self.out(factors.prod(1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)


CHECKS = SUITES["fusion"]().checks
QUICK = [name for name in CHECKS if "compiles" not in name]


def failures(make: Callable[..., Fusion]) -> Iterator[str]:
    for name in QUICK:
        try:
            CHECKS[name](make)
        except (AssertionError, RuntimeError):
            yield name


def test_the_sound_one_passes() -> None:
    assert list(failures(Sound)) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_the_broken_one_is_caught(mutant: Callable[..., Fusion]) -> None:
    assert any(failures(mutant))  # the first is enough


@pytest.mark.parametrize(
    "check",
    [
        fusions.an_uninformative_modality_can_be_dropped,
        fusions.missing_modalities_never_cost_more_than_all_knowledge,
    ],
)
def test_a_factor_of_one_for_an_absent_modality_is_caught(
    check: Callable[[fusions.Maker], None],
) -> None:
    with pytest.raises(AssertionError, match="accuracy"):
        check(FactorOfOne)


class NullUnused(Sound):
    def or_null(self, embedding: Tensor, present: Tensor) -> Tensor:
        return embedding


def test_a_fusion_that_leaves_its_null_out_is_told_what_to_do() -> None:
    expected = r"null gets no gradient: pass the embedding through self\.or_null\(\.\.\.\)"
    with pytest.raises(AssertionError, match=expected):
        fusions.every_parameter_is_registered_and_gets_a_gradient(NullUnused)


def test_the_report_names_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    problems = {name: p for name, p in CHECKS.run(PaddingCounted) if p}
    assert "padding_changes_nothing" in problems
    assert main_check("late_mean") == 0
    out = capsys.readouterr().out
    assert f"{len(CHECKS)} of {len(CHECKS)} checks passed" in out
