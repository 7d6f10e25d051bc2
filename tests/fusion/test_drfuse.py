"""`drfuse`: the pool of shared parts, attention by class, and its loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusionzoo.fusion.base import Draws
from fusionzoo.fusion.hybrid._disentangle import divergence, pooled_logit, random_part, ranking
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import close, context, made

TARGET = torch.arange(8) % 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def test_the_pool_is_the_logit_of_the_mean_probability_as_in_the_paper() -> None:
    x, present = draw(8, 3, 5), patterns(3)
    found = pooled_logit(x, present)
    for row in range(7):
        mean = x[row, present[row]].sigmoid().mean(0)
        close(found[row], mean.logit())
        assert (found[row] <= x[row, present[row]].amax(0) + 1e-12).all()
        assert (found[row] >= x[row, present[row]].amin(0) - 1e-12).all()
    assert (found[-1] == 0).all()
    assert pooled_logit(torch.tensor([[[800.0], [-800.0]]]), full(1, 2)).isfinite().all()
    x = draw(6, 2, 5)
    h1, h2 = x.unbind(1)
    top = torch.stack([h1 + h2, h1 + h2, h1, h2]).logsumexp(0)
    bottom = torch.stack([0 * h1, 0 * h1, h1, h2]).logsumexp(0)
    close(pooled_logit(x, full(6, 2)), top - bottom)


def test_divergence_is_nothing_only_where_shared_parts_are_equal() -> None:
    x, present = draw(8, 3, 5), patterns(3)
    found = divergence(x, present)
    several = present.sum(1) > 1
    assert (found[several] > 0).all()
    close(found[~several], torch.zeros(4).double())
    close(divergence(x[:, :1].expand(8, 3, 5), present), torch.zeros(8).double())
    p = x[0].sigmoid()
    close(found[0], (p * (p / p.mean(0)).log()).sum() / 3)


@pytest.mark.parametrize("per_class", ["key", "query"])
def test_each_class_attends_by_itself(per_class: str) -> None:
    fusion, x = made("drfuse", per_class=per_class), features(full(4))
    output = fusion(x)
    shared = pooled_logit(output.extra["shared"], full(4))
    tokens = torch.stack([*output.extra["distinct"].unbind(1), shared], dim=1)
    q, v, *k = fusion.attention(tokens).split(8, dim=-1)
    for c in range(4):
        query = q.mean(1) + (fusion.class_query[c] if per_class == "query" else 0)
        scores = torch.einsum("bd,bnd->bn", query, k[c if per_class == "key" else 0])
        weights = (scores / 8**0.5).softmax(-1)
        close(output.extra["attention"][:, c], weights)
        f = torch.einsum("bn,bnd->bd", weights, v)
        close(output.logits[:, c], f @ fusion.head.weight[c] + fusion.head.bias[c])
    share = output.extra["attention"].mean(1)[:, :3]
    close(output.weights, share / share.sum(1, keepdim=True))


def test_attention_without_weights_is_uniform_over_what_is_present() -> None:
    fusion, x = made("drfuse"), features(patterns(3)[:-1])
    torch.nn.init.zeros_(fusion.attention.weight)
    torch.nn.init.zeros_(fusion.attention.bias)
    tokens = torch.cat([patterns(3)[:-1], torch.ones(7, 1, dtype=torch.bool)], dim=1).double()
    wanted = tokens / tokens.sum(1, keepdim=True)
    close(fusion(x).extra["attention"], wanted[:, None].expand(-1, 4, -1))


def test_ranking_charges_attention_to_the_token_with_the_larger_loss() -> None:
    attention, votes = draw(5, 4, 3).softmax(-1), draw(5, 3, 4)
    target = torch.arange(5) % 4
    present = torch.tensor([[True, True]] * 3 + [[True, False], [False, False]])
    found = ranking(attention, votes, target, present)
    for row in range(5):
        here = [n for n, bit in enumerate(present[row]) if bit] + [2] * bool(present[row].any())
        terms = []
        for i in here:
            for j in here:
                if i < j:
                    labels = F.one_hot(target[row], 4).double()
                    losses = [
                        F.binary_cross_entropy_with_logits(votes[row, n], labels, reduction="none")
                        for n in (i, j)
                    ]
                    better = torch.where(losses[0] < losses[1], 1, -1)
                    gap = attention[row, :, i] - attention[row, :, j]
                    terms.append((-better * gap).clamp(min=0).mean())
        close(found[row], torch.stack(terms).mean() if terms else torch.tensor(0.0).double())


def test_ranking_leaves_unknown_labels_out_and_numbers_alone() -> None:
    attention, votes = draw(5, 4, 3).softmax(-1), draw(5, 3, 4)
    one_hot = F.one_hot(torch.arange(5) % 4, 4).double()
    both = full(5, 2)
    found = ranking(attention, votes, one_hot, both)
    close(found, ranking(attention, votes, torch.arange(5) % 4, both))
    unknown = one_hot.clone()
    unknown[:, 1] = float("nan")
    kept = [0, 2, 3]
    wanted = ranking(attention[:, kept], votes[..., kept], one_hot[:, kept], both)
    close(ranking(attention, votes, unknown, both), wanted)
    for width in (4, 2):
        assert (ranking(attention, votes, draw(5, width), both) == 0).all()


def test_the_loss_adds_up_its_terms_over_what_is_present() -> None:
    fusion, x = made("drfuse", disentangle=0.5, rank=0.3), features(patterns(3))
    output, criterion, present = fusion(x), context(8).criterion, patterns(3)
    extra = output.extra
    wanted = criterion(extra["shared_logits"], TARGET) + 0.5 * divergence(extra["shared"], present)
    for column, logits in enumerate(output.unimodal.values()):
        pair = extra["shared"][:, column], extra["distinct"][:, column]
        term = criterion(logits, TARGET) + 0.5 * F.cosine_similarity(*pair).abs()
        wanted += term * present[:, column]
    votes = torch.stack([*output.unimodal.values(), extra["shared_logits"]], dim=1)
    wanted += 0.3 * ranking(extra["attention"], votes, TARGET, present)
    total = criterion(output.logits, TARGET)
    found = fusion.loss(output, TARGET, context(8))
    close(found[:-1], (total + wanted)[:-1], 1e-5)
    close(found[-1], total[-1], 1e-6)


def test_a_share_of_the_training_rows_loses_some_modalities() -> None:
    torch.manual_seed(0)
    part = random_part(full(4000), 0.3, Draws())
    assert part.any(1).all()
    fewer = ~part.all(1)
    assert abs(fewer.double().mean() - 0.3) < 4 * (0.21 / 4000) ** 0.5
    for size in (1, 2):
        assert abs((part[fewer].sum(1) == size).double().mean() - 0.5) < 0.06
    assert torch.equal(random_part(patterns(3), 0.0, Draws()), patterns(3))
    fusion, x = made("drfuse", aug_missing=1.0), features(full(4))
    assert fusion(x).extra["present"].all()
    assert not fusion.train()(x).extra["present"].all(1).any()
