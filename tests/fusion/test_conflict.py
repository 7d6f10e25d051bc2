"""`ecml` and `dbf`: averages of opinions, discounts, and what conflict costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusionzoo.fusion.late._conflict import conflict_of, discount, uncertainty
from fusionzoo.fusion.late.tmc import combine, evidential_loss
from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import close, context, copy, made

TARGET = torch.arange(8) % 4


def evidence(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return 5 * torch.rand(*shape, generator=draw).double() ** 2


def test_averaging_evidence_is_averaging_opinions_and_one_alone_answers() -> None:
    output = made("ecml")(features(full(6)))
    views = output.extra["views"]
    belief = views / (4 + views.sum(-1, keepdim=True))
    u = uncertainty(views)
    others = torch.stack([u[:, [n for n in range(3) if n != m]].prod(1) for m in range(3)], dim=1)
    joined = (belief * others[..., None]).sum(1) / others.sum(1, keepdim=True)
    found = output.extra["joined"]
    close(found / (4 + found.sum(-1, keepdim=True)), joined)
    close(output.extra["uncertainty"], 3 / (1 / u).sum(1))
    close(output.logits.softmax(-1), (found + 1) / (4 + found.sum(-1, keepdim=True)))
    for name in ("ecml", "dbf"):
        output = made(name)(keep_only(features(full(3)), "text"))
        close(output.logits, output.unimodal["text"])


@pytest.mark.parametrize("kappa", [1.0, 2.0, 3.0])
def test_a_discount_moves_belief_to_uncertainty(kappa: float) -> None:
    e = evidence(6, 3, 4)
    trust = made("dbf", kappa=kappa).trust(conflict_of(e))
    c = conflict_of(e)
    for m in range(3):
        wanted = torch.ones(6).double()
        for n in range(3):
            if n != m:
                wanted *= (1 - c[:, m, n] ** kappa) ** (1 / kappa)
        close(trust[:, m], wanted)
    belief = trust[..., None] * e / (4 + e.sum(-1, keepdim=True))
    doubt = 1 - trust * (1 - uncertainty(e))
    close(belief.sum(-1) + doubt, torch.ones(6, 3).double())
    close(discount(e, trust), 4 * belief / doubt[..., None])
    close(uncertainty(discount(e, trust)), doubt)
    assert (discount(e, trust).sum(-1) <= 4 * trust / (1 - trust)).all()


def test_discounting_never_lowers_the_uncertainty_and_does_nothing_to_equal_opinions() -> None:
    ecml, x = made("ecml"), features(patterns(3))
    dbf = copy(ecml, made("dbf"))
    assert (dbf(x).extra["uncertainty"] >= ecml(x).extra["uncertainty"] - 1e-12).all()
    same = evidence(6, 1, 4).expand(6, 3, 4)
    assert (conflict_of(same) == 0).all()
    close(discount(same, dbf.trust(conflict_of(same))), same)


def test_two_modalities_sure_of_different_classes_are_certain_uncertain_or_in_doubt() -> None:
    e = torch.zeros(1, 2, 5).double()
    e[0, 0, 1] = e[0, 1, 3] = 100
    discounted = discount(e, made("dbf").trust(conflict_of(e)))
    found = [uncertainty(x) for x in (combine(e), e.mean(1), discounted.mean(1))]
    close(torch.cat(found), torch.tensor([0.0244, 0.0476, 0.870]).double(), 5e-4)


@pytest.mark.parametrize("name", ["ecml", "dbf"])
def test_dividing_by_all_modalities_raises_the_uncertainty_and_keeps_the_class(name: str) -> None:
    plain, x = made(name), features(patterns(3)[:-1])
    strict = copy(plain, made(name, penalise_missing=True))
    missing = ~patterns(3)[:-1].all(1)
    more = strict(x).extra["uncertainty"] > plain(x).extra["uncertainty"] + 1e-6
    assert torch.equal(more, missing)
    assert torch.equal(strict(x).logits.argmax(-1), plain(x).logits.argmax(-1))


@pytest.mark.parametrize("name", ["ecml", "dbf"])
def test_the_loss_is_the_mean_evidential_loss_and_the_conflict_of_pairs(name: str) -> None:
    fusion, x = made(name, conflict=0.7), features(patterns(3))
    output = fusion(x)
    found = fusion.loss(output, TARGET, context(8, epoch=25.0))
    for row, present in enumerate(patterns(3)[:-1].tolist()):
        views = output.extra["views"][row, present]
        count = len(views)
        terms = [evidential_loss(v[None], TARGET[row : row + 1], 0.5) for v in views]
        terms.append(evidential_loss(output.extra["joined"][row][None], TARGET[row : row + 1], 0.5))
        conflict = sum(
            conflict_of(views[None])[0, m, n] for m in range(count) for n in range(count) if n != m
        )
        wanted = sum(terms) / (count + 1) + 0.7 * conflict / max(count - 1, 1)
        close(found[row].double(), wanted[0], 1e-5)
    close(found[-1].double(), context(1).criterion(output.logits[-1:], TARGET[-1:])[0], 1e-6)
