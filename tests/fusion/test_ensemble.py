"""The fusion that training from several seeds makes; tests/training/test_seeds.py trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features
from fusionzoo.testing.runner import SUITES

CHECKS = SUITES["fusion"]().checks
TRAINED = (  # its members are; the sum of squares of a unit vector has no gradient
    "every_parameter_is_registered_and_gets_a_gradient",
    "missing_modalities_never_cost_more_than_all_knowledge",
    "an_uninformative_modality_can_be_dropped",
    "one_modality_alone_is_enough_to_learn",
)
LONG = ("it_compiles_whole", "it_exports_with_free_sizes")


def make(
    dims: Mapping[str, int],
    dim: int,
    num_outputs: int,
    names: Sequence[str] = ("gmu", "attn_pool"),
    **settings: Any,
) -> Fusion:
    members = [{"name": name, "dim": dim // 2} for name in names]
    all_logits = [[0, num_outputs]]
    return create_fusion(
        "ensemble", dims, dim, num_outputs, members=members, one_of=all_logits, **settings
    )


@pytest.mark.parametrize("names", [("gmu", "attn_pool"), ("late_mean", "late_weighted")])
@pytest.mark.parametrize("check", [x for x in CHECKS if x not in (*TRAINED, *LONG)])
def test_it_keeps_the_contract(check: str, names: Sequence[str]) -> None:
    CHECKS[check](partial(make, names=names))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile and export
@pytest.mark.parametrize("name", LONG)
def test_it_compiles_and_exports(name: str) -> None:
    CHECKS[name](make)


def test_each_member_reads_its_part_of_what_is_encoded_apart() -> None:
    fusion: Any = make({"image": 4, "text": 3}, 8, 2, apart=["image"])
    tokens = torch.arange(4.0).expand(1, 1, 4)
    shared = Features(torch.ones(1, 1, 3), torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 3))
    features = {"image": Features(tokens, shared.mask, tokens[:, 0]), "text": shared}
    parts = [fusion.features_of(number, features) for number in (0, 1)]
    assert [x["image"].pooled.tolist() for x in parts] == [[[0.0, 1.0]], [[2.0, 3.0]]]
    assert [x["image"].tokens.tolist() for x in parts] == [[[[0.0, 1.0]]], [[[2.0, 3.0]]]]
    assert parts[1]["text"].pooled is shared.pooled


def test_widths_that_are_not_those_of_the_members_are_an_error() -> None:
    with pytest.raises(FusionZooError, match="are not those of 2 members"):
        make({"image": 5}, 8, 2, apart=["image"])
