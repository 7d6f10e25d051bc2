"""The late fusions are what their formulas say."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion, fusion_info, list_fusions
from fusionzoo.fusion.base import Draws
from fusionzoo.fusion.late._conflict import conflict_of, discount, uncertainty
from fusionzoo.fusion.late.late_stacking import assign_folds
from fusionzoo.fusion.late.late_vote import LateVote
from fusionzoo.fusion.late.pdf import co_belief, relative_calibration
from fusionzoo.fusion.late.qmf import History, ranking_loss
from fusionzoo.fusion.late.simmlm import more_beats_fewer, nested_subsets
from fusionzoo.fusion.late.tmc import combine, divergence, evidential_loss
from fusionzoo.structures import Features, keep_only
from fusionzoo.testing.fusions import features, full, maker, patterns, rows_of
from fusionzoo.testing.runner import SUITES
from helpers.oracle import WIDTHS, close, context, copy, dempster, given, made

TARGET = torch.arange(8) % 4


def votes_of(fusion: Fusion, x: dict[str, Features]) -> Tensor:
    """(M, B, K) of complete samples, without the module's own forward."""
    direct = all(fusion.heads[m].in_features == WIDTHS[m] for m in WIDTHS)
    read = {m: x[m].pooled if direct else fusion.project[m](x[m].pooled) for m in WIDTHS}
    return torch.stack([fusion.heads[m](read[m]) for m in WIDTHS])


def test_the_max_rule_takes_probabilities_so_a_constant_changes_nothing() -> None:
    fusion, x = made("late_max"), features(full(6))
    largest = votes_of(fusion, x).softmax(-1).max(0).values
    close(fusion(x).logits.exp(), largest / largest.sum(-1, keepdim=True))
    before = fusion(x).logits
    with torch.no_grad():
        fusion.heads["text"].bias += 7
    close(fusion(x).logits, before)


def test_equal_modalities_are_idempotent_under_every_fixed_rule() -> None:
    x = torch.randn(4, 5).double()
    dims = {"a": 5, "b": 5}
    mask = torch.ones(4, 1, dtype=torch.bool)
    both = {m: Features(x[:, None], mask, x) for m in dims}
    for name in ("late_mean", "late_max", "late_confidence", "ume"):
        fusion = made(name, dims, project=True)
        with torch.no_grad():
            fusion.project["b"].load_state_dict(fusion.project["a"].state_dict())
            fusion.heads["b"].load_state_dict(fusion.heads["a"].state_dict())
        single = fusion.heads["a"](fusion.project["a"](x))
        close(fusion(both).logits.softmax(-1), single.softmax(-1))


def test_a_vote_counts_first_choices_whatever_their_temperature_and_breaks_ties() -> None:
    fusion, x = made("late_vote"), features(full(50))
    votes = votes_of(fusion, x)
    for row in range(50):
        counts = torch.bincount(votes[:, row].argmax(-1), minlength=4)
        leaders = (counts == counts.max()).nonzero()[:, 0].tolist()
        share = votes[:, row].softmax(-1).mean(0)
        assert int(fusion(x).logits[row].argmax()) == max(leaders, key=lambda k: share[k])
    total = fusion(x).logits.exp().sum(-1)
    close(total, torch.ones(50).double())
    assert LateVote.EPS < 1  # a tie-break never outweighs a vote
    x = features(torch.tensor([[False, True, False]]).expand(6, 3))
    first = votes_of(fusion, x)[1].argmax(-1)
    assert torch.equal(fusion(x).logits.argmax(-1), first)
    with torch.no_grad():
        for parameter in fusion.heads["text"].parameters():
            parameter *= 3
    assert torch.equal(fusion(x).logits.argmax(-1), first)


def test_confidence_weighs_votes_by_kappa_and_ignores_constants_and_order() -> None:
    x = features(patterns(3))
    mean = made("late_mean")
    close(copy(mean, made("late_confidence", kappa=0.0))(x).logits, mean(x).logits)
    sure = copy(mean, made("late_confidence", kappa=1e6))
    y = features(full(5))
    votes = votes_of(sure, y)
    entropy = -(votes.softmax(-1) * votes.log_softmax(-1)).sum(-1)
    wanted = torch.stack([votes[entropy[:, b].argmin(), b] for b in range(5)])
    close(sure(y).logits, wanted)
    fusion = made("late_confidence")
    votes = torch.randn(4, 3, 4).double()
    for measure in ("entropy", "max", "margin"):
        fusion.measure = measure
        close(fusion.confidence(votes + 5), fusion.confidence(votes))
        close(fusion.confidence(votes.flip(-1)), fusion.confidence(votes))
    fusion.measure = "entropy"
    close(fusion.confidence(torch.zeros(1, 1, 4).double())[0, 0], -torch.tensor(4.0).double().log())


def test_the_unimodal_ensemble_learns_what_separate_runs_learn() -> None:
    fusion, x = made("ume", project=True), features(full(6))
    fusion.loss(fusion(x), TARGET[:6], context(6)).sum().backward()
    for m in WIDTHS:
        alone = {n: p.clone().detach().requires_grad_() for n, p in fusion.named_parameters()}
        z = F.linear(x[m].pooled, alone[f"project.{m}.weight"], alone[f"project.{m}.bias"])
        z = F.linear(z, alone[f"heads.{m}.weight"], alone[f"heads.{m}.bias"])
        F.cross_entropy(z, TARGET[:6], reduction="sum").backward()
        for part in (f"project.{m}.weight", f"heads.{m}.bias"):
            close(fusion.get_parameter(part).grad, alone[part].grad)


# ---- project


PROJECTED = [name for name in list_fusions("late") if "project" in fusion_info(name).parameters]
CHECKS = SUITES["fusion"]().checks
KEPT = (  # of the contract, the checks that the setting could break
    "a_state_dict_restores_it_exactly",
    "every_parameter_is_registered_and_gets_a_gradient",
    "gradients_stay_finite_and_do_not_reach_what_is_absent",
    "its_phases_train_every_parameter",
    "the_content_of_a_missing_modality_changes_nothing",
    "the_order_of_its_modalities_does_not_matter",
)


@pytest.mark.parametrize("check", KEPT)
@pytest.mark.parametrize("name", PROJECTED)
def test_the_contract_holds_with_the_other_value_of_project(check: str, name: str) -> None:
    default = fusion_info(name).parameters["project"].default
    CHECKS[check](maker(name, {"project": not default}))


@pytest.mark.parametrize("name", ["late_mean", "qmf", "tmc"])
def test_without_a_projection_the_classifiers_read_the_features(name: str) -> None:
    fusion, x = made(name, project=False), features(full(4))
    for m, width in WIDTHS.items():
        assert fusion.heads[m].weight.shape == (4, width)
        z = x[m].pooled @ fusion.heads[m].weight.T + fusion.heads[m].bias
        close(fusion(x).unimodal[m], (1 + F.softplus(z)).log() if name == "tmc" else z)
    own = {"null", "prior_logits"} | {f"heads.{m}.{p}" for m in WIDTHS for p in ("weight", "bias")}
    assert {key for key, _ in fusion.named_parameters()} == own


def test_without_a_projection_the_embedding_is_a_fixed_map_that_keeps_lengths_and_angles() -> None:
    dims = {"image": 40, "text": 60}
    draw = torch.Generator().manual_seed(0)
    pooled = {m: torch.randn(50, width, generator=draw) for m, width in dims.items()}
    fusion, x = create_fusion("tmc", dims, 4096, 3), given(**pooled)
    maps = {m: fusion.project[m].weight for m in dims}
    close(fusion(x).embedding, sum(pooled[m] @ maps[m].T for m in dims) / 2, 1e-5)
    found = 4 * fusion(x).embedding @ fusion(x).embedding.T
    wanted = sum(v @ v.T for v in pooled.values())
    assert (found - wanted).abs().max() < 0.1 * wanted.diagonal().mean()
    fusion.loss(fusion(x), torch.arange(50) % 3, context(50)).sum().backward()
    assert not any(w.requires_grad for w in maps.values())
    assert {f"project.{m}.weight" for m in dims} <= fusion.state_dict().keys()


# ---- tmc


def test_the_closed_form_is_the_sequential_dempster_rule_in_any_order() -> None:
    views = torch.rand(5, 3, 4).double() * 3
    for order in itertools.permutations(range(3)):
        a, b, c = (views[:, i] for i in order)
        close(combine(views), dempster(dempster(a, b), c), 1e-9)


def test_no_evidence_is_neutral_doubt_only_shrinks_and_strong_evidence_is_a_product() -> None:
    views = torch.rand(5, 3, 4).double() * 3
    vacuous = torch.zeros(5, 1, 4).double()
    close(combine(torch.cat([views, vacuous], 1)), combine(views))
    doubt = 4 / (combine(views).sum(-1) + 4)
    assert (doubt[:, None] <= 4 / (views.sum(-1) + 4)).all()
    views = views[:, :2] + 0.1
    joined, wanted = combine(1e9 * views), views.prod(1)
    close(joined / joined.sum(-1, keepdim=True), wanted / wanted.sum(-1, keepdim=True), 1e-6)
    views = 1e8 * torch.eye(4)[None, :2]  # single precision, each sure of another class
    assert torch.isfinite(combine(views)).all()
    assert not torch.isfinite(dempster(views[:, 0], views[:, 1])).all()


def test_the_evidential_fit_is_the_expected_cross_entropy() -> None:
    """200,000 draws, within four standard errors."""
    evidence = torch.tensor([0.5, 2.0, 1.0, 0.1]).double()
    torch.manual_seed(0)
    draws = torch.distributions.Dirichlet(evidence + 1).sample((200_000,))
    found = -draws[:, 1].log()
    wanted = evidential_loss(evidence[None], torch.tensor([1]), 0.0)[0]
    assert (found.mean() - wanted).abs() < 4 * found.std() / math.sqrt(len(found))


def test_no_evidence_costs_a_harmonic_number_and_no_divergence() -> None:
    none = torch.zeros(1, 4).double()
    harmonic = torch.tensor(1 + 1 / 2 + 1 / 3, dtype=torch.float64)
    close(evidential_loss(none, torch.tensor([2]), 1.0)[0], harmonic)
    alpha = torch.tensor([1.5, 2.0, 1.0, 4.0]).double()
    ours = torch.distributions.kl_divergence(
        torch.distributions.Dirichlet(alpha), torch.distributions.Dirichlet(torch.ones(4).double())
    )
    close(divergence(alpha), ours)


def test_the_logits_of_tmc_are_the_expected_distribution_and_its_loss_is_weighted() -> None:
    fusion, x = made("tmc"), features(full(4))
    alpha = combine(F.softplus(votes_of(fusion, x)).transpose(0, 1)) + 1
    close(fusion(x).logits.softmax(-1), alpha / alpha.sum(-1, keepdim=True))
    pseudo = made("tmc", pseudo_view=True)
    assert "joint.weight" in dict(pseudo.named_parameters())
    assert torch.isfinite(pseudo.loss(pseudo(x), TARGET[:4], context(4))).all()
    fusion, x = made("tmc"), features(full(6))
    output, weight = fusion(x), torch.tensor([0.0, 1.0, 2.5, 4.0])[TARGET[:6]]
    plain = fusion.loss(output, TARGET[:6], context(6))
    close(
        fusion.loss(output, TARGET[:6], context(6)._replace(row_weight=weight)),
        weight * plain,
        1e-6,
    )


# ---- qmf


def test_qmf_weighs_votes_by_their_energy_and_is_not_shift_invariant() -> None:
    fusion, x = made("qmf"), features(full(5))
    votes = votes_of(fusion, x)
    wanted = sum(votes[m] * votes[m].logsumexp(-1, keepdim=True) / 10 for m in range(3))
    close(fusion(x).logits, wanted)
    before = fusion(x).logits.softmax(-1)
    with torch.no_grad():
        fusion.heads["text"].bias += 3
    assert not torch.allclose(fusion(x).logits.softmax(-1), before)


def test_a_detached_energy_weighs_a_vote_without_a_gradient_of_its_own() -> None:
    """Then the energy is all that the bias of a head moves its own logit by, and no other."""
    x = features(full(6))
    for detach in (False, True):
        fusion = made("qmf", detach=detach)
        output = fusion(x)
        bias = fusion.heads["text"].bias
        (slope,) = torch.autograd.grad(output.logits[:, 0].sum(), bias)
        energy = output.extra["energy"][:, 1].sum()
        assert torch.isclose(slope[0], energy) == detach
        assert (slope[1:] == 0).all() == detach


def test_ranking_costs_nothing_where_the_harder_has_less_energy_by_the_margin() -> None:
    hardness = torch.tensor([[0.1], [0.5], [0.9]])
    there = torch.ones(3, 1, dtype=torch.bool)
    assert (ranking_loss(-2 * hardness, hardness, there) == 0).all()
    wrong = ranking_loss(hardness, hardness, there)
    close(wrong, 2 * (hardness - hardness.roll(-1, 0)).abs()[:, 0])
    assert (ranking_loss(hardness, hardness, ~there) == 0).all()


def test_the_history_adds_up_what_was_seen_in_training_of_what_is_present() -> None:
    history = History(4, 2)
    assert (history.hardness(torch.tensor([0, 1])) == 0).all()  # the first epoch: no history yet
    there = torch.tensor([[True, True], [True, False]])
    for _ in range(2):
        history.add(torch.tensor([3, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), there)
    assert history.total.tolist() == [[0, 0], [6, 0], [0, 0], [2, 4]]
    close(history.hardness(torch.tensor([3, -1])), torch.tensor([[1 / 3, 1.0], [0.0, 0.0]]), 1e-6)
    fusion, x = made("qmf"), features(full(6))
    history = fusion.prepare(TARGET[:6])
    fusion.loss(fusion(x), TARGET[:6], context(6, memory=history))
    assert (history.total == 0).all()
    fusion.train()
    fusion.loss(fusion(x), TARGET[:6], context(6, memory=history))
    votes = votes_of(fusion, x).movedim(2, 1)
    losses = F.cross_entropy(votes, TARGET[:6].expand(3, -1), reduction="none")
    close(history.total, losses.T.float(), 1e-5)


# ---- stacking


def test_stacking_with_averaging_weights_is_the_mean_of_probabilities() -> None:
    fusion, x = made("late_stacking", folds=2), features(full(4))
    with torch.no_grad():
        fusion.joiner.weight.zero_()
        fusion.joiner.bias.zero_()
        for m in range(3):
            fusion.joiner.weight[:, 4 * m : 4 * m + 4] = torch.eye(4).double() / 3
    own = torch.stack([z.exp() for z in fusion(x).unimodal.values()])
    close(fusion(x).logits, own.mean(0))


def test_classifiers_learn_from_other_folds_and_the_stacker_from_the_one_left_out() -> None:
    fusion, x = made("late_stacking", folds=3), features(full(6))
    folds = fusion.prepare(TARGET[:6])
    for row in range(6):
        fusion.zero_grad()
        loss = fusion.loss(fusion(x), TARGET[:6], context(6, memory=folds))
        loss[row].backward()
        for m in WIDTHS:
            per_fold = fusion.heads[m].grad.abs().sum((1, 2))
            assert per_fold[folds.fold[row]] == 0
            assert (per_fold > 0).sum() == 2
    fusion.zero_grad()
    output = fusion(x)
    loss = fusion.loss(output, TARGET[:6], context(6, phase=1, memory=folds))
    loss.sum().backward()
    assert all(fusion.heads[m].grad is None for m in WIDTHS)
    shares = output.extra["fold_logits"].softmax(-1)
    unseen = torch.stack([shares[row, :, folds.fold[row]] for row in range(6)])
    wanted = F.cross_entropy(fusion.stack(unseen, full(6)), TARGET[:6], reduction="none")
    close(loss, wanted)


def test_random_labels_look_learnt_in_fold_and_are_chance_out_of_fold() -> None:
    torch.manual_seed(0)
    rows = torch.randn(60, 40)
    target = torch.randint(2, (60,))
    x = {"a": Features(rows[:, None], torch.ones(60, 1, dtype=torch.bool), rows)}
    fusion = create_fusion("late_stacking", {"a": 40}, 16, 2, folds=5)
    folds = fusion.prepare(target)
    optimizer = torch.optim.Adam(fusion.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        fusion.loss(fusion(x), target, context(60, memory=folds)).mean().backward()
        optimizer.step()
    votes = fusion(x).extra["fold_logits"][:, 0].argmax(-1)  # (60, folds)
    fold = folds.fold
    unseen = votes.gather(1, fold[:, None])[:, 0]
    seen = votes.gather(1, (fold[:, None] + 1) % 5)[:, 0]
    assert (seen == target).float().mean() > 0.95
    assert (unseen == target).float().mean() < 0.7


@pytest.mark.parametrize("groups", [[], [str(row // 2) for row in range(120)]])
def test_folds_of_an_interleaved_table_hold_every_class_alike(groups: list[str]) -> None:
    """Row number modulo K would put each class into one fold alone."""
    targets = torch.arange(120) % 5
    if groups:
        targets = targets.reshape(2, 60).T.flatten()  # pairs of one class
    fold = assign_folds(targets, groups, 5, seed=0)
    counts = torch.stack([torch.bincount(targets[fold == f], minlength=5) for f in range(5)])
    assert counts.min() >= 4 and counts.max() <= 6
    assert torch.equal(fold, assign_folds(targets, groups, 5, seed=0))
    assert not torch.equal(fold, assign_folds(targets, groups, 5, seed=1))


def test_samples_of_one_group_are_never_in_different_folds() -> None:
    draw = torch.Generator().manual_seed(0)
    groups = [f"patient {number}" for number in torch.randint(23, (200,), generator=draw).tolist()]
    fold = assign_folds(torch.randint(3, (200,), generator=draw), groups, 4, seed=0)
    for name in set(groups):
        assert len({int(fold[row]) for row, group in enumerate(groups) if group == name}) == 1
    assert set(fold.tolist()) == {0, 1, 2, 3}


def twins(groups: int, count: int, draw: torch.Generator) -> tuple[dict[str, Features], Tensor]:
    """Modality `look` tells the group and nothing else; `sign` tells the class, with noise."""
    target = torch.randint(2, (groups,), generator=draw).repeat_interleave(count)
    look = torch.randn(groups, 40, generator=draw).repeat_interleave(count, 0)
    look = look + 0.05 * torch.randn(len(target), 40, generator=draw)
    sign = (2.0 * target[:, None] - 1) * torch.tensor([1.0, 0.5])
    return given(look=look, sign=sign + 1.2 * torch.randn(len(target), 2, generator=draw)), target


def test_the_stacker_does_not_trust_what_was_memorised_if_groups_are_known() -> None:
    """Accuracy on new groups before and after the stacking phase: 0.70 and 0.83; 0.59 and 0.52 with
    folds that tear groups apart, for then a twin in another fold gives the answer away."""
    draw = torch.Generator().manual_seed(0)
    (x, target), (new, wanted) = twins(40, 5, draw), twins(1000, 1, draw)
    groups = [str(row // 5) for row in range(200)]
    gains = []
    for names in (groups, []):
        torch.manual_seed(0)
        fusion = create_fusion("late_stacking", {"look": 40, "sign": 2}, 8, 2)
        folds, accuracy = fusion.prepare(target, names, 0), []
        for number, phase in enumerate(fusion.phases):
            learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
            optimizer = torch.optim.Adam(learning, lr=(2e-2, 1e-1)[number])
            for _ in range((30, 40)[number]):
                optimizer.zero_grad()
                loss = fusion.loss(fusion(x), target, context(200, phase=number, memory=folds))
                loss.mean().backward()
                optimizer.step()
            accuracy.append((fusion(new).logits.argmax(-1) == wanted).float().mean().item())
        gains.append(accuracy[1] - accuracy[0])
    assert gains[0] > 0.05
    assert gains[1] < 0


def test_too_few_groups_are_refused_and_rows_outside_the_split_have_a_fold_too() -> None:
    with pytest.raises(FusionZooError, match="folds=5, and the training split has 3 independent"):
        made("late_stacking").prepare(torch.zeros(9, dtype=torch.int64), [*"aaabbbccc"])
    folds = made("late_stacking", folds=2).prepare(torch.tensor([0, 1, 0, 1]))
    assert folds.of(torch.tensor([3, -1])).tolist() == [int(folds.fold[3]), int(folds.fold[0])]
    nothing = made("late_stacking").prepare(torch.zeros(0, dtype=torch.int64))
    assert nothing.of(torch.tensor([0, -1])).tolist() == [0, 0]


def test_the_prior_of_the_training_split_is_its_class_frequencies() -> None:
    fusion = made("late_poe", prior="train")
    fusion.prepare(torch.tensor([0, 0, 0, 1, 2]))
    nothing = rows_of(features(patterns(3)), slice(7, 8))
    wanted = torch.tensor([4.0, 2.0, 2.0, 1.0]).double() / 9
    close(fusion(nothing).logits[0].exp(), wanted, 1e-6)


# ---- ecml, dbf


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


# ---- pdf


def confidences(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return 0.05 + 0.9 * torch.rand(*shape, generator=draw).double()


def test_shares_of_others_add_up_and_are_the_papers_of_two_modalities() -> None:
    t, present = confidences(8, 3), patterns(3)
    shares = (co_belief(t, present) - t).masked_fill(~present, 0).sum(1)
    close(shares, (present.sum(1) - 1).clamp(min=0).double())
    t = confidences(6, 2)
    logs = t.log()
    wanted = t + logs.flip(1) / logs.sum(1, keepdim=True)
    close(co_belief(t, full(6, 2)), wanted)


def test_belief_rises_with_the_own_confidence_and_falls_with_the_others() -> None:
    t = confidences(1, 3).requires_grad_()
    shares = co_belief(t, full(1)) - t
    for m in range(3):
        (slope,) = torch.autograd.grad(shares[0, m], t, retain_graph=True)
        assert slope[0, m] > 0
        assert all(slope[0, n] < 0 for n in range(3) if n != m)


def test_equal_confidence_is_the_mean_rule() -> None:
    fusion, x = made("pdf", calibrate=False), features(patterns(3))
    for head in fusion.confidence.values():
        nn.init.zeros_(head[-1].weight)
        nn.init.zeros_(head[-1].bias)
    close(fusion(x).logits, copy(fusion, made("late_mean", project=False), strict=False)(x).logits)


def test_calibration_lowers_all_but_the_most_certain_modality() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(6, 3, 4, generator=draw).double()
    certainty = (z.softmax(-1) - 0.25).abs().mean(-1)
    k = relative_calibration(z, full(6))
    for row in range(6):
        best = certainty[row].argmax()
        assert k[row, best] == 1
        for m in range(3):
            others = torch.stack([certainty[row, n] for n in range(3) if n != m]).mean()
            close(k[row, m], (certainty[row, m] / others).clamp(max=1))
    assert (k < 1).any(1).all()
    sure = F.one_hot(torch.arange(4)).double()[None] * 1e3
    close((sure.softmax(-1) - 0.25).abs().mean(-1), torch.full((1, 4), 2 * 3 / 16.0).double())
    assert (relative_calibration(torch.zeros(1, 3, 4).double(), full(1)) == 1).all()
    uniform_beside_sure = torch.stack([torch.zeros(4), sure[0, 0].float()])[None].double()
    assert relative_calibration(uniform_beside_sure, full(1, 2)).tolist() == [[0.0, 1.0]]


def test_a_single_modality_is_its_own_answer() -> None:
    output = made("pdf")(keep_only(features(full(3)), "text"))
    close(output.logits, output.unimodal["text"])


def test_the_fused_loss_teaches_the_confidence_nothing_and_its_own_the_encoder_nothing() -> None:
    fusion, x = made("pdf", project=True).train(), features(full(8))
    fusion(x).logits.square().sum().backward()
    assert all(p.grad is None for p in fusion.confidence.parameters())
    fusion.zero_grad()
    fusion(x).extra["confidence"].sum().backward()
    assert all(p.grad is None for p in fusion.heads.parameters())
    assert all(p.grad is None for p in fusion.project.parameters())
    assert all((p.grad != 0).any() for p in fusion.confidence.parameters())


def test_the_loss_is_that_of_every_classifier_and_the_error_of_the_confidence() -> None:
    fusion, x = made("pdf"), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    wanted = criterion(output.logits, TARGET)
    for column, logits in enumerate(output.unimodal.values()):
        p = logits.softmax(-1)[torch.arange(8), TARGET]
        error = (output.extra["confidence"][:, column] - p).abs()
        wanted += (criterion(logits, TARGET) + error) * patterns(3)[:, column]
    close(fusion.loss(output, TARGET, context(8)), wanted, 1e-6)


def test_without_activations_a_confidence_head_is_one_linear_map() -> None:
    fusion = made("pdf", project=True, linear_confidence=True)
    head = fusion.confidence["text"]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).double()
    middle = head(x[:2].mean(0, keepdim=True))
    close(middle, head(x[:2]).mean(0, keepdim=True))
    assert list(fusion.confidence) == list(WIDTHS)


# ---- simmlm


def silent(mix: str) -> torch.nn.Module:
    fusion = made("simmlm", mix=mix)
    for parameter in fusion.router[-1].parameters():
        torch.nn.init.zeros_(parameter)
    return fusion


def test_without_router_weights_it_is_the_mean_of_what_it_mixes() -> None:
    x = features(patterns(3)[:-1])
    fusion = silent("logit")
    close(fusion(x).logits, copy(fusion, made("late_mean"), strict=False)(x).logits)
    fusion = silent("prob")
    close(fusion(x).logits, copy(fusion, made("late_mean", space="prob"), strict=False)(x).logits)
    fusion = silent("log_prob")
    mean = copy(fusion, made("late_mean"), strict=False)(x).logits
    close(fusion(x).logits.softmax(-1), mean.softmax(-1))


@pytest.mark.parametrize("mix", ["log_prob", "logit", "prob", "feature"])
def test_a_single_modality_is_its_own_answer_and_weights_add_up_to_one(mix: str) -> None:
    fusion = made("simmlm", mix=mix)
    output = fusion(keep_only(features(full(3)), "text"))
    close(output.logits.softmax(-1), output.unimodal["text"].softmax(-1))
    aligned, present = fusion.aligned(x := features(full(3)))
    votes = torch.stack([*fusion(x).unimodal.values()], dim=1)
    _, weights = fusion._mixture(aligned, votes, present)
    close(weights.sum(1), torch.ones(3).double())


@pytest.mark.parametrize(("mix", "same"), [("log_prob", True), ("logit", False)])
def test_a_constant_added_to_a_modalitys_logits_matters_only_if_they_are_not_normalised(
    mix: str, same: bool
) -> None:
    fusion, x = made("simmlm", mix=mix), features(full(3))
    before = fusion(x).logits.softmax(-1)
    with torch.no_grad():
        fusion.heads["text"].bias += 3
    assert torch.allclose(fusion(x).logits.softmax(-1), before) == same


def test_the_hinge_shifts_the_gradient_to_more_modalities() -> None:
    more = torch.tensor([2.0, 1.0], requires_grad=True)
    fewer = torch.tensor([1.0, 2.0], requires_grad=True)
    more_beats_fewer(more, fewer, 0.1).sum().backward()
    close(more.grad, torch.tensor([0.6, 0.5]))
    close(fewer.grad, torch.tensor([0.4, 0.5]))
    fewer.grad = None
    more_beats_fewer(more, fewer, 2.0, detach_fewer=True).sum().backward()
    close(fewer.grad, torch.tensor([0.5, 0.5]))


def test_subsets_are_nested_of_any_size_and_do_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    present = patterns(4).repeat(600, 1)
    more, fewer = nested_subsets(present, Draws())
    assert (fewer <= more).all() and (more <= present).all()
    count = present.sum(1)
    assert (fewer.sum(1) < more.sum(1))[count > 1].all()
    alone = count == 1
    assert torch.equal(more[alone], present[alone]) and torch.equal(fewer[alone], present[alone])
    complete = count == 4
    sizes = more[complete].sum(1)
    for size in (2, 3, 4):
        assert abs((sizes == size).double().mean() - 1 / 3) < 4 * (2 / 9 / 600) ** 0.5
    assert not more[count == 0].any()
    torch.manual_seed(0)
    draws = Draws()
    start = draws.state.clone()
    first = nested_subsets(full(8), draws)
    draws.state.copy_(start)
    second = nested_subsets(torch.cat([full(4), patterns(3)[:4]]), draws)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x[:4], y[:4])


def test_the_last_phase_compares_nested_subsets_and_the_first_trains_each_expert() -> None:
    fusion, x = made("simmlm", alpha=0.2).train(), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    more, fewer = criterion(output.logits, TARGET), criterion(output.extra["fewer"], TARGET)
    wanted = (more + fewer) / 2 + 0.2 * (more - fewer).clamp(min=0)
    found = fusion.loss(output, TARGET, context(8, phase=1))
    close(found[:-1], wanted[:-1])
    alone = patterns(3).sum(1) == 1
    close(found[alone], more[alone])
    own = torch.stack([criterion(z, TARGET) for z in output.unimodal.values()], dim=1)
    first = fusion.loss(output, TARGET, context(8, phase=0))
    close(first[:-1], (own * patterns(3)).sum(1)[:-1])
    assert [phase.name for phase in fusion.phases] == ["experts", "all"]
    assert len(made("simmlm", expert_share=0.0).phases) == 1
    assert "fewer" not in fusion.eval()(x).extra


def test_settings_that_reward_failure_are_refused() -> None:
    for settings in ({"alpha": 0.6}, {"alpha": -0.1}, {"expert_share": 1.0}):
        with pytest.raises(FusionZooError, match=r"alpha is 0 to 0\.5, or more with"):
            create_fusion("simmlm", WIDTHS, 8, 4, **settings)
    assert create_fusion("simmlm", WIDTHS, 8, 4, alpha=0.6, detach_fewer=True).classes_only
    assert not create_fusion("simmlm", WIDTHS, 8, 4, mix="logit").classes_only
