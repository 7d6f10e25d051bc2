"""The attention fusions are what their formulas say."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from fusionzoo.fusion import create_fusion
from fusionzoo.fusion.attention._blocks import Experts, Router, imbalance
from fusionzoo.fusion.base import combination_of
from fusionzoo.structures import Features
from fusionzoo.testing.fusions import features, full, patterns, rows_of
from helpers.oracle import TWO, WIDTHS, aligned, close, context, copy, made

Given = dict[str, Features]


def repeated(x: Given, names: tuple[str, ...]) -> Given:
    """Repeat every token of some modalities."""
    return {
        m: Features(f.tokens.repeat(1, 2, 1), f.mask.repeat(1, 2), f.pooled) if m in names else f
        for m, f in x.items()
    }


def turned(x: Given) -> Given:
    """Reverse the tokens of every modality."""
    return {m: Features(f.tokens.flip(1), f.mask.flip(1), f.pooled) for m, f in x.items()}


# ---- attn_pool


def test_attention_pooling_without_a_score_is_the_mean() -> None:
    fusion, x = made("attn_pool"), features(patterns(3))
    mean = made("mean")
    copy(fusion, mean, strict=False)
    torch.nn.init.zeros_(fusion.score.weight)
    close(fusion(x).logits, mean(x).logits)


def test_attention_pooling_weighs_by_the_gated_score_and_picks_the_largest_in_the_limit() -> None:
    fusion, x = made("attn_pool"), features(full(4))
    a = torch.stack(list(aligned(fusion, x).values()), dim=1)
    s = fusion.score(fusion.content(a).tanh() * fusion.gate(a).sigmoid())[..., 0]
    close(fusion(x).weights, s.softmax(1))
    close(fusion(x).embedding, torch.einsum("bm,bmd->bd", s.softmax(1), a))
    with torch.no_grad():
        fusion.score.weight *= 1e6
    close(fusion(x).embedding, a[torch.arange(4), s.argmax(1)])


# ---- co_attention


def swapped(fusion: torch.nn.Module) -> torch.nn.Module:
    """The same fusion of (text, image) with the streams' parameters exchanged."""
    other = made("co_attention", dict(reversed(TWO.items())))
    state = fusion.state_dict()
    width, bits = state["join.weight"].split([16, 2], dim=1)
    first, second = width.split(8, dim=1)
    state["join.weight"] = torch.cat([second, first, bits.flip(1)], dim=1)
    other.load_state_dict(state)
    return other


def test_swapping_the_streams_swaps_nothing_so_updates_are_synchronous() -> None:
    fusion, x = made("co_attention", TWO), features(full(4, 2))
    close(swapped(fusion)(x).logits, fusion(x).logits)


def test_co_attention_without_its_cross_output_is_independent_transformers() -> None:
    fusion, x = made("co_attention"), features(full(3))
    for layer in fusion.layers:
        for stream in layer.values():
            torch.nn.init.zeros_(stream.across.out.weight)
            torch.nn.init.zeros_(stream.across.out.bias)
    seen: list[Tensor] = []
    fusion.join.register_forward_hook(lambda _m, i, _o: seen.append(i[0][:, :8]))
    fusion(x)
    fusion({**x, "text": x["text"]._replace(tokens=x["text"].tokens + 1)})
    close(seen[0], seen[1])


# ---- perceiver, qformer, gated_xattn


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("perceiver", {}),
        ("perceiver", {"resampler": True}),
        ("perceiver", {"io_decoder": True}),
        ("concat_transformer", {}),  # it has no positions
    ],
)
def test_the_order_of_tokens_is_ignored(name: str, settings: dict[str, bool]) -> None:
    fusion, x = made(name, **settings), features(full(3))
    close(fusion(turned(x)).logits, fusion(x).logits)


def test_repeating_all_tokens_changes_the_resampler_but_no_other_cross_attention() -> None:
    x = features(full(3))
    twice = repeated(x, tuple(WIDTHS))
    plain, resampler = made("perceiver"), made("perceiver", resampler=True)
    close(plain(twice).logits, plain(x).logits)
    assert not torch.allclose(resampler(twice).logits, resampler(x).logits)
    cross = made("cross_attention")
    keys = tuple(m for m in WIDTHS if m != cross.query)
    close(cross(repeated(x, keys)).logits, cross(x).logits)


def test_queries_without_their_cross_output_know_nothing_but_text() -> None:
    fusion, x = made("qformer", text="text", num_layers=3), features(full(3))
    assert [layer.across is not None for layer in fusion.layers] == [True, False, True]
    for layer in fusion.layers[::2]:
        torch.nn.init.zeros_(layer.across.out.weight)
        torch.nn.init.zeros_(layer.across.out.bias)
    wanted = fusion(x).logits
    for m, same in (("image", True), ("audio", True), ("text", False)):
        other = {**x, m: x[m]._replace(tokens=x[m].tokens + 1)}
        assert torch.allclose(fusion(other).logits, wanted) == same, m


def test_closed_gates_leave_the_base_stream_and_without_media_attention_closes() -> None:
    torch.manual_seed(0)
    fusion = create_fusion("gated_xattn", WIDTHS, 8, 4, base="text").double().eval()
    x = features(full(4))
    layers, bare = fusion.layers, torch.nn.ModuleList()
    found = fusion(x).embedding
    fusion.layers = bare
    assert torch.equal(fusion(x).embedding, found)
    fusion.layers = layers
    fusion(x).logits.square().sum().backward()
    for layer in fusion.layers:
        assert layer.attention_gate.grad != 0
        assert all((p.grad == 0).all() for p in layer.attention.parameters())
    fusion = made("gated_xattn")
    x = features(torch.tensor([[True, False, False]]))
    open_gates = fusion(x).embedding
    with torch.no_grad():
        for layer in fusion.layers:
            layer.attention_gate.zero_()
    assert torch.equal(fusion(x).embedding, open_gates)
    with torch.no_grad():
        for layer in fusion.layers:
            layer.mlp_gate.zero_()
    assert not torch.allclose(fusion(x).embedding, open_gates)


# ---- mixtures of experts


def expert(experts: Experts, number: int, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.gelu(x @ experts.wide[number] + experts.wide_bias[number])
    return hidden @ experts.narrow[number] + experts.narrow_bias[number]


def test_a_token_gets_the_weighted_answers_of_its_experts_or_of_all() -> None:
    torch.manual_seed(0)
    experts, router = Experts(6, 5).double(), Router(6, 5, 2, "softmax", 0.0).double()
    x = torch.randn(7, 6).double()
    scores, gates, _ = router(x, torch.ones(7, dtype=torch.bool))
    assert ((gates > 0).sum(1) == 2).all()
    close(gates.sum(1), torch.ones(7).double())
    every = torch.stack([expert(experts, e, x) for e in range(5)], dim=1)
    for row in range(7):
        best = scores[row].topk(2)
        wanted = best.values.softmax(0) @ every[row, best.indices]
        close(experts(x, gates)[row], wanted)
    torch.manual_seed(0)
    router = Router(6, 3, 3, "laplace", 0.0).double()
    x = torch.randn(7, 6).double()
    gates = router(x, torch.ones(7, dtype=torch.bool)).gates
    close(gates, router.scores(x).softmax(-1))


@pytest.mark.parametrize("name", ["fuse_moe", "flex_moe"])
def test_equal_experts_are_one_expert_whatever_the_router_says(name: str) -> None:
    fusion, x = made(name), features(patterns(3))
    with torch.no_grad():
        for parameter in fusion.experts.parameters():
            parameter.copy_(parameter[:1].clone().expand_as(parameter))
    before = fusion(x).logits
    with torch.no_grad():
        for part, parameter in fusion.named_parameters():
            if "centres" in part:
                parameter.copy_(torch.randn_like(parameter))
    close(fusion(x).logits, before)


def test_a_laplace_router_likes_what_is_near_and_ignores_rotations() -> None:
    torch.manual_seed(0)
    router = Router(6, 4, 2, "laplace", 0.0).double()
    x = router.centres.detach().clone()
    assert torch.equal(router.scores(x).argmax(1), torch.arange(4))
    turn = torch.linalg.qr(torch.randn(6, 6).double()).Q
    before = router.scores(x)
    with torch.no_grad():
        router.centres.copy_(router.centres @ turn)
    close(router.scores(x @ turn), before)


def test_balance_costs_nothing_only_where_experts_share_evenly() -> None:
    even, some = torch.full((8, 4), 0.25), torch.eye(4)[:2]
    close(imbalance(even, even), torch.tensor(0.0), 1e-6)
    assert imbalance(some, even[:2]) > 0.5
    assert imbalance(even[:2], some) > 0.5


@pytest.mark.parametrize("gate", ["softmax", "laplace"])
def test_a_dead_expert_gets_a_gradient_towards_the_tokens(
    gate: Literal["softmax", "laplace"],
) -> None:
    torch.manual_seed(0)
    router = Router(6, 5, 2, gate, 0.5).double()
    x = torch.nn.functional.layer_norm(torch.randn(200, 6).double(), (6,)) + 1
    with torch.no_grad():
        router.centres[3] = -1.0  # far from all tokens, and on their other side
    routing = router(x, torch.ones(200, dtype=torch.bool))
    assert routing.gates[:, 3].max() == 0
    imbalance(routing.gates, routing.load).backward()
    slope = router.centres.grad[3]
    assert slope.norm() > 0
    with torch.no_grad():
        router.centres[3] -= 1e-3 * slope / slope.norm()
    before, after = routing.scores[:, 3].mean(), router.scores(x)[:, 3].mean()
    assert after > before


def test_the_load_is_the_probability_of_being_among_the_best_under_fresh_noise() -> None:
    """100,000 draws of the noise of one expert at a time; within four standard errors."""
    torch.manual_seed(0)
    router = Router(6, 5, 2, "softmax", 0.7).double()
    x = torch.randn(3, 6).double()
    torch.manual_seed(1)
    load = router(x, torch.ones(3, dtype=torch.bool)).load
    scores = router.scores(x)
    torch.manual_seed(1)
    noisy = scores + 0.7 * torch.randn_like(scores)
    for expert_number in range(5):
        others = noisy.clone()
        others[:, expert_number] = -torch.inf
        bar = others.topk(2).values[:, 1]
        draws = scores[:, expert_number] + 0.7 * torch.randn(100_000, 3).double()
        share = (draws > bar).double().mean(0)
        assert ((load[:, expert_number] - share).abs() < 4 * 0.5 / 100_000**0.5).all()
    router.eval()
    routing = router(x, torch.tensor([True, True, False]))
    assert torch.equal(routing.load, (routing.gates > 0).double())


def test_laplace_scores_are_the_distances_without_their_differences() -> None:
    torch.manual_seed(0)
    router, x = Router(256, 16, 4, "laplace", 0.1), torch.randn(500, 256)
    wanted = -torch.linalg.vector_norm(x.double()[:, None] - router.centres.double(), dim=-1)
    close(router.scores(x).double(), wanted, 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(router.scores(x).double(), wanted, 1e-5)
    at_centre = router.centres.detach().clone().requires_grad_()
    router.scores(at_centre).sum().backward()
    assert torch.isfinite(at_centre.grad).all()


def test_only_real_tokens_are_routed() -> None:
    fusion, x = made("fuse_moe"), features(patterns(3))
    gates = fusion(x).extra["gates"]
    real = torch.cat([x[m].mask for m in WIDTHS], dim=1).flatten()
    assert torch.equal((gates > 0).any(1), real)
    assert ((gates > 0).sum(1)[real] == 4).all()


def test_combinations_are_numbered_and_the_bank_stands_in_by_them() -> None:
    assert combination_of(patterns(3)).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    fusion = made("flex_moe")
    complete, two = features(full(2)), features(torch.tensor([[True, False, True]]))
    before = fusion(complete).logits, fusion(two).logits
    with torch.no_grad():
        fusion.bank[2, 1] += torch.arange(8)  # combination 2: text is absent; its slot is number 1
    assert torch.equal(fusion(complete).logits, before[0])
    assert not torch.allclose(fusion(two).logits, before[1])


def test_incomplete_samples_teach_the_router_their_combination() -> None:
    fusion = made("flex_moe", balance_weight=1.0)
    x = features(torch.tensor([[True, False, True]]))
    output = fusion(x)
    target = torch.tensor([1])
    scores = output.extra["scores"][output.extra["mask"].flatten()]
    wanted = -scores.log_softmax(-1)[:, 2].mean()
    loss = fusion.loss(output, target, context(1)) - context(1).criterion(output.logits, target)
    close(loss[0], wanted, 1e-6)


# ---- all
def shorten(x: Given) -> Given:
    return {
        m: Features(f.tokens[:, f.mask[0]], f.mask[:, f.mask[0]], f.pooled) for m, f in x.items()
    }


ATTENTION = ["co_attention", "mult", "perceiver", "qformer", "fuse_moe"]
ATTENTION += ["concat_transformer", "cross_attention", "mbt"]


@pytest.mark.parametrize("name", ATTENTION)
def test_cutting_the_padding_off_changes_nothing(name: str) -> None:
    fusion, x = made(name), features(full(3))
    together = fusion(x).logits
    for row in range(3):
        close(fusion(shorten(rows_of(x, slice(row, row + 1)))).logits, together[row : row + 1])
