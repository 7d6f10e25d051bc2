"""The attention fusions are what their formulas say."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.fusion.attention._blocks import Experts, Router, TransformerBlock, imbalance, join
from fusionzoo.fusion.attention.mult import (
    MulT,
    Stacks,
    Weights,
    group_by_size,
    last_step,
    positions,
    with_positions,
)
from fusionzoo.fusion.base import combination_of
from fusionzoo.structures import Features, keep_only, masked_mean
from fusionzoo.testing.fusions import DIMS, Inputs, features, full, patterns, rows_of
from helpers.oracle import TWO, WIDTHS, aligned, close, context, copy, made


def repeated(x: Inputs, names: tuple[str, ...]) -> Inputs:
    """Repeat every token of some modalities."""
    return {
        m: Features(f.tokens.repeat(1, 2, 1), f.mask.repeat(1, 2), f.pooled) if m in names else f
        for m, f in x.items()
    }


def turned(x: Inputs) -> Inputs:
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


ATTENTION = ["co_attention", "mult", "perceiver", "qformer", "fuse_moe"]
ATTENTION += ["concat_transformer", "cross_attention", "mbt"]


@pytest.mark.parametrize("name", ATTENTION)
def test_cutting_the_padding_off_changes_nothing(name: str) -> None:
    fusion, x = made(name), features(full(3))
    together = fusion(x).logits
    for row in range(3):
        short = {
            m: Features(f.tokens[:, f.mask[0]], f.mask[:, f.mask[0]], f.pooled)
            for m, f in rows_of(x, slice(row, row + 1)).items()
        }
        close(fusion(short).logits, together[row : row + 1])


# ---- multiway


@pytest.mark.parametrize("share", ["attention", "none"])
def test_equal_experts_are_a_block_over_all_tokens(share: str) -> None:
    fusion, x = made("multiway", num_layers=1, fused_layers=0, share=share), features(patterns(3))
    layer, block = fusion.layers[0], TransformerBlock(8, 4, 0.1).double().eval()
    if share == "attention":
        experts = [*layer.experts.values()]
        block.norm, block.attention, block.mlp = layer.norm, layer.attention, experts[0]
        for expert in experts[1:]:
            expert.load_state_dict(experts[0].state_dict())
    else:
        blocks = [*layer.blocks.values()]
        block = blocks[0]
        for other in blocks[1:]:
            other.load_state_dict(block.state_dict())
    tokens, masks = fusion.embedded(x)
    joined, mask = join(tokens, masks, next(iter(tokens.values())))
    close(torch.cat([*layer(tokens, masks).values()], dim=1), block(joined, mask))


def test_without_attention_output_it_is_one_stack_of_mlps_per_modality() -> None:
    fusion, x = made("multiway", fused_layers=0), features(full(3))
    for layer in fusion.layers:
        nn.init.zeros_(layer.attention.out.weight)
        nn.init.zeros_(layer.attention.out.bias)
    tokens, masks = fusion.embedded(x)
    means = []
    for name in WIDTHS:
        y = tokens[name]
        for layer in fusion.layers:
            y = y + layer.experts[name](y)
        means.append(masked_mean(fusion.norm(y), masks[name]))
    close(fusion(x).embedding, torch.stack(means).mean(0))


@pytest.mark.parametrize("share", ["attention", "none"])
def test_a_modality_alone_is_its_own_transformer_and_trains_no_other_expert(share: str) -> None:
    fusion, x = made("multiway", share=share), keep_only(features(full(3)), "text")
    alone = made("multiway", {"text": WIDTHS["text"]}, share=share)
    alone.load_state_dict({k: fusion.state_dict()[k] for k in alone.state_dict()})
    output = fusion(x)
    close(output.logits, alone(x).logits)
    output.logits.square().sum().backward()
    for name, parameter in fusion.named_parameters():
        if ".experts." in name or ".blocks." in name:
            moves = parameter.grad is not None and bool((parameter.grad != 0).any())
            assert moves == (".text." in name), name


# ---- healnet


@pytest.mark.parametrize("self_attention", [False, True])
def test_an_absent_modality_leaves_the_model_without_its_layers(self_attention: bool) -> None:
    fusion, x = made("healnet", self_attention=self_attention), features(full(3))
    for names in (*itertools.combinations(WIDTHS, 2), *((m,) for m in WIDTHS)):
        fewer = made("healnet", {m: WIDTHS[m] for m in names}, self_attention=self_attention)
        fewer.load_state_dict({k: fusion.state_dict()[k] for k in fewer.state_dict()})
        close(fusion(keep_only(x, *names)).logits, fewer(x).logits)


def test_the_tokens_of_a_modality_are_a_set() -> None:
    fusion, x = made("healnet"), features(full(3))
    wanted = fusion(x).logits
    text = x["text"]
    turned = Features(text.tokens.flip(1), text.mask.flip(1), text.pooled)
    twice = Features(text.tokens.repeat(1, 2, 1), text.mask.repeat(1, 2), text.pooled)
    for other in (turned, twice):
        close(fusion({**x, "text": other}).logits, wanted)


def test_without_output_weights_it_is_the_mean_of_the_latents() -> None:
    fusion, x = made("healnet", self_attention=True), features(full(3))
    for step in fusion.modules():
        for name in ("out", "narrow"):
            if isinstance(linear := getattr(step, name, None), nn.Linear):
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)
    close(fusion(x).embedding, fusion.norm(fusion.latents.mean(0)).expand(3, -1))


def test_attention_is_sharpened_to_a_temperature_of_one_half() -> None:
    fusion = made("healnet", {"text": 7}, num_layers=1, num_heads=2, head_dim=3)
    x = features(full(1, 2))
    step, tokens = fusion.read[0]["text"], x["text"].tokens[:, x["text"].mask[0]]
    context = step.context_norm(tokens)
    keys, values = step.key_value(context)[0].chunk(2, dim=-1)
    query = step.query(step.norm(fusion.latents))
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        scores = query[:, part] @ keys[:, part].T / 3**0.5
        heads.append((scores / 0.5).softmax(-1) @ values[:, part])
    attended = nn.functional.leaky_relu(step.out(torch.cat(heads, dim=-1)), 0.01)
    z = fusion.latents + attended
    wide, gate = step.wide(step.mlp_norm(z)).chunk(2, dim=-1)
    z = z + step.narrow(wide * nn.functional.selu(gate))
    close(fusion(x).embedding[0], fusion.norm(z.mean(0)))


def test_the_order_of_the_modalities_matters() -> None:
    fusion, x = made("healnet"), features(full(3))
    reversed_order = copy(fusion, made("healnet", dict(reversed(WIDTHS.items()))))
    assert not torch.allclose(reversed_order(x).logits, fusion(x).logits, atol=1e-3)


# ---- zorro, mca


SUBSETS = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def reading_grads(fusion: Fusion, output: int) -> list[bool]:
    """Return whether a pooled vector depends on each modality's tokens."""
    x = features(full(2))
    leaves = {m: f._replace(tokens=f.tokens.requires_grad_()) for m, f in x.items()}
    fusion.pooled_streams(leaves)[:, output].square().sum().backward()
    return [bool((f.tokens.grad != 0).any()) for f in leaves.values()]


@pytest.mark.parametrize("num_layers", [1, 3])
def test_each_stream_and_channel_reads_its_own_modalities_and_fusion_tokens_all(
    num_layers: int,
) -> None:
    for name, subsets in (("zorro", [(0, 1, 2)]), ("mca", SUBSETS)):
        fusion = made(name, num_layers=num_layers)
        for number, subset in enumerate([(0,), (1,), (2,), *subsets]):
            assert reading_grads(fusion, number) == [n in subset for n in range(3)], subset


def test_a_modalitys_own_answer_is_the_same_whatever_else_is_there() -> None:
    fusion, x = made("zorro"), features(full(3))
    together = fusion(x).unimodal
    for name in WIDTHS:
        close(fusion(keep_only(x, name)).unimodal[name], together[name])


def test_a_channel_is_a_zorro_of_its_modalities() -> None:
    mca, x = made("mca"), features(full(3))
    for number, subset in enumerate(SUBSETS):
        names = [list(WIDTHS)[column] for column in subset]
        zorro = made("zorro", {m: WIDTHS[m] for m in names}, num_fusion_tokens=4)
        state = {k: v for k, v in mca.state_dict().items() if k in zorro.state_dict()}
        for key in ("fusion_tokens", "channel_queries"):
            state[key] = mca.state_dict()[key][number : number + 1]
        zorro.load_state_dict(state)
        answer = zorro(x)
        close(mca.head(mca.pooled_streams(x)[:, 3 + number]), answer.logits)
        close(mca(keep_only(x, *names)).logits, answer.logits)
        close(mca(keep_only(x, *names)).embedding, answer.embedding)


def test_zorro_without_its_mask_is_the_single_stream_transformer() -> None:
    zorro = made("zorro", num_fusion_tokens=1)
    plain, x = copy(zorro, made("concat_transformer"), strict=False), features(full(3))
    with torch.no_grad():
        plain.cls.copy_(zorro.fusion_tokens[0, 0])
    tokens, masks = zorro.embedded(x)
    joined = torch.cat([*tokens.values(), zorro.fusion_tokens[0].expand(3, -1, -1)], dim=1)
    mask = F.pad(torch.cat([*masks.values()], dim=1), (0, 1), value=True)
    fused = zorro.norm(zorro.transform(joined, mask[:, None]))[:, -1]
    close(fused, plain(x).embedding)


def test_a_modalitys_stream_is_a_transformer_with_the_shared_blocks() -> None:
    zorro, x = made("zorro"), features(full(1))
    tokens, masks = zorro.embedded(x)
    for column, name in enumerate(WIDTHS):
        y, mask = tokens[name], masks[name]
        for block in zorro.blocks:
            y = block(y, mask)
        query = zorro.queries[name].expand(1, 1, -1)
        wanted = query + zorro.pool(query, zorro.norm(y), mask)
        close(zorro.pooled_streams(x)[:, column], wanted[:, 0])


def test_the_channel_of_what_is_present_answers_or_the_first_largest() -> None:
    mca = made("mca")
    x = features(patterns(3))
    output, logits = mca(x), mca.head(mca.pooled_streams(x))
    order = {(0,): 0, (1,): 1, (2,): 2} | {s: 3 + n for n, s in enumerate(SUBSETS)}
    for row, bits in enumerate(patterns(3)[:-1].tolist()):
        stream = order[tuple(n for n, bit in enumerate(bits) if bit)]
        close(output.logits[row], logits[row, stream])
    close(output.embedding[-1], mca.null)
    mca = made("mca", sizes=[2])
    logits, streams = mca(x).logits, mca.head(mca.pooled_streams(x))
    close(logits[0], streams[0, 3])  # complete: the first pair
    close(logits[3], streams[3, 0])  # only the first modality
    mca = made("mca", sizes=[3])
    close(mca(x).logits[1], mca.head(mca.pooled_streams(x))[1, 0])  # of a pair its first


def test_a_channel_learns_only_from_rows_that_have_all_of_it() -> None:
    mca, target = made("mca"), torch.tensor([1])
    losses = context(1).criterion

    def loss(*names: str) -> tuple[Tensor, Tensor]:
        x = keep_only(features(full(1)), *names)
        return mca.loss(mca(x), target, context(1)), mca.head(mca.pooled_streams(x))[0]

    found, streams = loss("image", "audio")
    wanted = [losses(streams[n : n + 1], target) for n in (0, 2, 4)]  # two alone, and their pair
    close(found, torch.stack(wanted).mean(0))
    found, streams = loss(*WIDTHS)
    close(found, torch.stack([losses(streams[n : n + 1], target) for n in range(7)]).mean(0))
    nothing, _ = loss()
    close(nothing, losses(mca.head(mca.null)[None], target))


def test_zorros_own_loss_averages_over_present_modalities() -> None:
    fusion, target = made("zorro"), torch.tensor([2])
    output = fusion(keep_only(features(full(1)), "text", "audio"))
    criterion = context(1).criterion
    own = [criterion(output.unimodal[m], target) for m in ("text", "audio")]
    wanted = criterion(output.logits, target) + torch.stack(own).mean(0)
    close(fusion.loss(output, target, context(1)), wanted)


def test_more_channels_than_it_can_have_are_refused() -> None:
    six = {**DIMS, "lidar": 3}
    assert made("mca", six, sizes=[6], num_layers=1).channels == [(0, 1, 2, 3, 4, 5)]
    with pytest.raises(FusionZooError, match="57 subsets, too many for a channel each; name the"):
        create_fusion("mca", six, 8, 4)


# ---- mult: the encoder of Tsai et al. 2019, sections 3.1 and 3.2, one sample and head at a time


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """CM(X_m, X_n) = softmax(Q K' / sqrt d) V for each head: (T, D), (S, D) x 2 -> (T, D)."""
    parts = zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True)
    return torch.cat([(a @ b.T / math.sqrt(a.shape[-1])).softmax(-1) @ c for a, b, c in parts], -1)


def encoder(
    weights: Weights, row: int, x: Tensor, source: Tensor | None, where: tuple[Tensor, Tensor]
) -> Tensor:
    """sqrt(D) x + positions, then per layer LN, attention, skip, LN, ReLU perceptron, skip; LN."""
    dim = x.shape[-1]
    heads = 5

    def part(layer: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        return layer[name][row], layer[f"{name}_bias"][row]

    def norm(layer: dict[str, Tensor], name: str, y: Tensor) -> Tensor:
        scale, shift = part(layer, name)
        return F.layer_norm(y, y.shape[-1:]) * scale + shift

    def affine(layer: dict[str, Tensor], name: str, y: Tensor) -> Tensor:
        matrix, shift = part(layer, name)
        return y @ matrix + shift

    x = math.sqrt(dim) * x + where[0]
    if source is not None:
        source = math.sqrt(dim) * source + where[1]
    for layer in weights[:-1]:
        queries = norm(layer, "norm", x)
        keys = queries if source is None else norm(layer, "norm", source)
        k, v = affine(layer, "key_value", keys).chunk(2, -1)
        mixed = softmax_attention(affine(layer, "query", queries), k, v, heads)
        if len(keys):
            x = x + affine(layer, "out", mixed)
        wide = affine(layer, "wide", norm(layer, "mlp_norm", x)).clamp(min=0)
        x = x + affine(layer, "narrow", wide)
    return norm(weights[-1], "norm", x)


def sinusoids(count: int, dim: int) -> Tensor:
    rows = [
        [(math.sin, math.cos)[j % 2](i / 10000 ** (j // 2 * 2 / dim)) for j in range(dim)]
        for i in range(count)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(count, dim)


def by_the_paper(fusion: MulT, x: Inputs, sample: int) -> Tensor:
    """Return the logits of one sample from its real tokens alone, pair after pair."""
    names, width = list(fusion.dims), 30
    real = {m: x[m].tokens[sample, x[m].mask[sample]] for m in names}
    if not any(map(len, real.values())):
        return fusion.head(fusion.null)
    embedded = {m: tokens @ fusion.embed[m].weight.T for m, tokens in real.items()}
    last = []
    for target in names:
        count = len(real[target])
        streams = []
        for row, (source, asks) in enumerate(fusion.pairs):
            if asks != target:
                continue
            where = sinusoids(count, width), sinusoids(len(real[source]), width)
            weights = fusion.crossmodal.weights()
            streams.append(encoder(weights, row, embedded[target], embedded[source], where))
        joined = torch.cat(streams, -1)
        where = sinusoids(count, joined.shape[-1])
        stream = encoder(fusion.memory[target].weights(), 0, joined, None, (where, where))
        last.append(stream[-1] if count else stream.new_zeros(joined.shape[-1]))
    h = torch.cat(last)
    first, second = fusion.mlp[0], fusion.mlp[3]
    h = h + second(first(h).clamp(min=0))
    present = torch.tensor([float(len(real[m]) > 0) for m in names], dtype=h.dtype)
    return fusion.head(fusion.join(torch.cat([h, present])))


def even(presence: Tensor, count: int) -> Inputs:
    """Features of equally many tokens in every modality, so that all stacks run as one."""
    x = features(presence)
    tokens = {m: torch.randn(len(presence), count, WIDTHS[m]).double() for m in WIDTHS}
    return {
        m: Features(tokens[m], f.mask.any(1, keepdim=True).expand(-1, count), f.pooled)
        for m, f in x.items()
    }


@pytest.mark.parametrize("lengths", ["one token", "six tokens", "different"])
def test_mult_is_the_papers_equations_with_and_without_missing_modalities(lengths: str) -> None:
    fusion = made("mult")
    torch.manual_seed(1)
    presence = patterns(3)
    same = even(presence, 1 if lengths == "one token" else 6)
    x = features(presence) if lengths == "different" else same
    logits = fusion(x).logits
    for sample in range(len(presence)):
        close(logits[sample], by_the_paper(fusion, x, sample), 1e-8)


def test_mult_of_one_modality_is_its_memory_stack() -> None:
    fusion, x = made("mult", {"image": 5}), features(full(3, 1))
    tokens, mask = x["image"].tokens[:1], x["image"].mask[:1]
    z = with_positions(with_positions(fusion.embed["image"](tokens), mask), mask)
    memory = fusion.memory["image"]
    h = last_step(memory(memory.weights(), z[None], mask[None])[0], mask)
    h = torch.cat([h + fusion.mlp(h), torch.ones(1, 1).double()], -1)
    close(fusion(x).logits[:1], fusion.head(fusion.join(h)))


def test_positions_count_real_tokens_and_the_last_step_is_real() -> None:
    mask = torch.tensor([[True, False, True, True, False]])
    found = positions(mask, 4, torch.zeros(1).double())[0]
    for step, index in ((0, 0), (2, 1), (3, 2)):
        close(found[step], sinusoids(3, 4)[index])
    x = torch.arange(5.0)[None, :, None]
    assert last_step(x, mask).item() == 3
    assert last_step(x, torch.zeros_like(mask)).item() == 0


def test_a_crossmodal_stack_without_outputs_is_the_normed_target() -> None:
    fusion, x = made("mult"), features(full(3))
    with torch.no_grad():
        for layer in fusion.crossmodal.layers:
            for name in ("out", "out_bias", "narrow", "narrow_bias"):
                layer[name].zero_()
    tokens = with_positions(fusion.embed["image"](x["image"].tokens), x["image"].mask)
    count = len(fusion.pairs)
    context = torch.randn(count, 3, 6, 30).double()
    weights = fusion.crossmodal.weights()
    there = torch.ones(count, 3, 6, dtype=torch.bool)
    found = fusion.crossmodal(weights, tokens.expand(count, -1, -1, -1), there, context)
    for row, stream in enumerate(found):
        last = {name: x[row, 0] for name, x in weights[-1].items()}
        close(stream, F.layer_norm(tokens, (30,), last["norm"], last["norm_bias"]))


def test_mult_has_a_stack_for_every_ordered_pair() -> None:
    for count in (2, 3):
        dims = dict(list(WIDTHS.items())[:count])
        fusion = made("mult", dims)
        assert sorted(fusion.pairs) == sorted((n, m) for n in dims for m in dims if n != m)
        assert fusion.crossmodal.count == count * (count - 1)


def test_padding_in_front_and_between_changes_nothing_even_with_positions() -> None:
    fusion, x = made("mult"), features(full(3))
    spread = {}
    for m, f in x.items():
        tokens = torch.full((3, 2 * f.mask.shape[1], f.tokens.shape[2]), 9.0).double()
        mask = torch.zeros(3, 2 * f.mask.shape[1], dtype=torch.bool)
        tokens[:, 1::2], mask[:, 1::2] = f.tokens, f.mask
        spread[m] = Features(tokens, mask, f.pooled)
    close(fusion(spread).logits, fusion(x).logits)


def test_biases_and_norms_of_stacks_are_vectors_so_weight_decay_leaves_them() -> None:
    stacks = Stacks(3, 10, 2, 5, 0.0)
    for name, parameter in stacks.named_parameters():
        assert (parameter.ndim == 1) == ("bias" in name or "norm" in name), name


def test_stacks_of_equal_lengths_share_their_products() -> None:
    """Counted, not timed."""
    assert group_by_size([5, 3, 5]) == [[0, 2], [1]]
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += "baddbmm" in str(func)
            return func(*args, **(kwargs or {}))

    fusion = made("mult")
    calls = []
    for x in (even(full(2), 1), features(full(2))):
        with Count() as counted:
            fusion(x)
        calls.append(counted.calls)
    products = 5 * 2  # of two layers
    assert calls == [2 * products, 0]  # the lengths 3, 4 and 5 share nothing


# ---- momke


TARGET = torch.arange(8) % 4


def authors_expert(fusion: Fusion, expert: str, x: Tensor) -> Tensor:
    """Transcribe an expert of the authors' code on one sequence (T, D) without padding."""
    for layer in fusion.experts[expert]:
        q = layer.query(x).unflatten(-1, (2, -1)).movedim(1, 0)
        key, value = layer.key_value(x).chunk(2, dim=-1)
        k, v = (z.unflatten(-1, (2, -1)).movedim(1, 0) for z in (key, value))
        attention = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)
        y = (attention @ v).movedim(0, 1).flatten(1)
        x = x + (y + layer.mlp(y))
    return x


def streams(fusion: Fusion, x: Inputs, row: int) -> Tensor:
    """Return the mean of X_n of each modality of a sample, zeros where absent: (M, D)."""
    means = []
    for name, own in x.items():
        tokens = fusion.project[name](own.tokens[row][own.mask[row]])
        if not len(tokens):
            means.append(torch.zeros(8).double())
            continue
        weights = fusion.router[name](tokens).softmax(-1)
        experts = torch.stack([authors_expert(fusion, e, tokens) for e in fusion.experts], dim=1)
        means.append((weights[..., None] * experts).sum(1).mean(0))
    return torch.stack(means)


def test_it_is_the_authors_mixture_for_every_subset() -> None:
    fusion, x = made("momke"), features(patterns(3))
    found = fusion(x)
    for row in range(7):
        h = streams(fusion, x, row).flatten()
        wanted = fusion.join(h + fusion.mix(h).relu())
        close(found.embedding[row], wanted)
        close(found.logits[row], fusion.head(wanted))
    close(found.embedding[7], fusion.null)


def test_a_router_that_keeps_to_its_own_expert_leaves_unimodal_transformers() -> None:
    fusion, x = made("momke"), features(full(3))
    for number, router in enumerate(fusion.router.values()):
        nn.init.zeros_(router[-1].weight)
        with torch.no_grad():
            router[-1].bias.copy_(1e4 * torch.eye(3)[number])
    for part in (fusion.mix.weight, fusion.mix.bias):
        nn.init.zeros_(part)
    found = fusion(x)
    for row in range(3):
        alone = [
            authors_expert(fusion, m, fusion.project[m](f.tokens[row][f.mask[row]])).mean(0)
            for m, f in x.items()
        ]
        close(found.embedding[row], fusion.join(torch.cat(alone)))  # W = 0: a concatenation
        logits = [fusion.expert_heads[m](h) for m, h in zip(WIDTHS, alone, strict=True)]
        close(found.extra["expert_logits"][row], torch.stack(logits))
    close(found.extra["routing"], torch.eye(3).double().expand(3, 3, 3))


def test_equal_experts_make_the_router_irrelevant_and_modalities_meet_after_them() -> None:
    fusion, x = made("momke"), features(full(3))
    first, *others = fusion.experts.values()
    for expert in others:
        expert.load_state_dict(first.state_dict())
    before = fusion(x).logits
    for parameter in fusion.router.parameters():
        nn.init.normal_(parameter)
    close(fusion(x).logits, before)
    fusion, x = made("momke"), features(full(2))
    leaves: Inputs = {m: f._replace(tokens=f.tokens.requires_grad_()) for m, f in x.items()}
    logits = fusion(leaves).extra["expert_logits"][:, 0]  # of the first modality alone
    slopes = torch.autograd.grad(logits.sum(), [f.tokens for f in leaves.values()])
    assert [bool(slope.any()) for slope in slopes] == [True, False, False]


def test_the_first_phase_trains_each_expert_alone_and_the_last_the_fusion() -> None:
    fusion, x = made("momke"), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    losses = [criterion(z, TARGET) for z in output.extra["expert_logits"].unbind(1)]
    here = patterns(3).double()
    wanted = (torch.stack(losses, dim=1) * here).sum(1) / here.sum(1).clamp(min=1)
    close(fusion.loss(output, TARGET, context(8, phase=0))[:-1], wanted[:-1])
    task = criterion(output.logits, TARGET)
    close(fusion.loss(output, TARGET, context(8, phase=1)), task)
    whole = made("momke", expert_share=0.0)
    assert len(whole.phases) == 1 and "expert_logits" not in whole(x).extra
    close(whole.loss(whole(x), TARGET, context(8)), criterion(whole(x).logits, TARGET))


def test_shares_name_the_experts_that_present_modalities_used() -> None:
    fusion, x = made("momke"), features(full(3))
    output = fusion(keep_only(x, "image", "audio"))
    shares = fusion.shares(output)
    assert [*shares] == ["expert of image", "expert of text", "expert of audio"]
    close(torch.stack([*shares.values()]).sum(0), torch.ones(3).double())
    close(shares["expert of text"], output.extra["routing"][:, [0, 2], 1].mean(1))
