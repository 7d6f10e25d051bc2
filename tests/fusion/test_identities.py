"""Each fusion is what its formula says: identities that hold exactly, against independent code."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fusionzoo.fusion import Fusion
from fusionzoo.structures import Features
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, made


def test_linear_concat_is_a_sum_of_one_linear_map_per_modality() -> None:
    fusion, given = made("concat", hidden=(), presence_bits=False), features(full(4))
    weight, bias = fusion.mlp[0].weight, fusion.mlp[0].bias
    parts = weight.split(list(WIDTHS.values()), dim=1)
    wanted = bias + sum(given[m].pooled @ w.T for m, w in zip(WIDTHS, parts, strict=True))
    close(fusion(given).embedding, wanted)


def test_presence_bits_tell_an_absent_modality_from_a_zero_one() -> None:
    given = features(full(1))
    zero = given["text"]._replace(pooled=torch.zeros_like(given["text"].pooled))
    gone = zero._replace(mask=torch.zeros_like(zero.mask))
    fusion = made("concat")
    there, absent = fusion({**given, "text": zero}), fusion({**given, "text": gone})
    assert not torch.allclose(there.logits, absent.logits)


def test_softmax_gates_of_two_modalities_are_the_tied_sigmoid_of_the_paper() -> None:
    dims = {"image": 5, "text": 7}
    fusion, given = made("gmu", dims), features(full(4, 2))
    u = [given[m].pooled @ fusion.project[m].weight.T for m in dims]
    first, second = fusion.gate.weight.chunk(2)
    z = (torch.cat(u, 1) @ (first - second).T).sigmoid()
    close(fusion(given).embedding, z * u[0].tanh() + (1 - z) * u[1].tanh())


def test_a_gmu_is_the_modality_that_is_present_and_without_gate_weights_the_mean() -> None:
    fusion, given = made("gmu"), features(full(4))
    alone = features(torch.tensor([[False, True, False]]))
    wanted = (alone["text"].pooled @ fusion.project["text"].weight.T).tanh()
    close(fusion(alone).embedding, wanted)
    torch.nn.init.zeros_(fusion.gate.weight)
    hidden = [(given[m].pooled @ fusion.project[m].weight.T).tanh() for m in WIDTHS]
    close(fusion(given).embedding, torch.stack(hidden).mean(0))


def test_lmf_is_a_linear_layer_on_the_outer_product_and_of_full_rank_any() -> None:
    fusion, given = made("lmf", rank=3), features(patterns(3)[:-1])
    out = []
    for row in range(7):
        ones = []
        for name, width in WIDTHS.items():
            here = bool(given[name].mask[row].any())
            x = given[name].pooled[row] if here else torch.zeros(width).double()
            ones.append(torch.cat([torch.ones(1).double(), x]))
        outer = torch.einsum("i,j,k->ijk", *ones)
        weight = torch.einsum(
            "r,rio,rjo,rko->oijk", fusion.rank_weights, *(fusion.factors[m] for m in WIDTHS)
        )
        out.append(torch.einsum("oijk,ijk->o", weight, outer) + fusion.bias)
    close(fusion(given).embedding, torch.stack(out))
    torch.nn.init.zeros_(fusion.rank_weights)
    close(fusion(given).embedding, fusion.bias.expand(7, -1))
    dims = {"image": 2, "text": 3}
    tensor = torch.randn(3, 4, 8).double()
    fusion = made("lmf", dims, rank=3)
    with torch.no_grad():
        fusion.rank_weights.fill_(1)
        fusion.bias.fill_(0)
        fusion.factors["image"].copy_(torch.eye(3)[:, :, None].expand(-1, -1, 8))
        fusion.factors["text"].copy_(tensor)
    x, y = torch.randn(5, 2).double(), torch.randn(5, 3).double()
    mask = torch.ones(5, 1, dtype=torch.bool)
    given = {"image": Features(x[:, None], mask, x), "text": Features(y[:, None], mask, y)}
    one = torch.ones(5, 1).double()
    wanted = torch.einsum("bi,bj,ijo->bo", torch.cat([one, x], 1), torch.cat([one, y], 1), tensor)
    close(fusion(given).embedding, wanted)


def votes_of(fusion: Fusion, given: dict[str, Features]) -> dict[str, Tensor]:
    return {m: fusion.heads[m](fusion.project[m](given[m].pooled)) for m in WIDTHS}


def test_late_mean_of_logits_is_the_geometric_mean_of_who_is_present() -> None:
    fusion, given = made("late_mean"), features(full(4))
    shares = torch.stack([z.softmax(-1) for z in votes_of(fusion, given).values()])
    geometric = shares.log().mean(0).exp()
    close(fusion(given).logits.softmax(-1), geometric / geometric.sum(-1, keepdim=True))
    given = features(torch.tensor([[True, False, True]]))
    votes = votes_of(fusion, given)
    close(fusion(given).logits, (votes["image"] + votes["audio"]) / 2)


def test_late_mean_of_probabilities_is_never_worse_than_the_mean_loss() -> None:
    fusion, given = made("late_mean", space="prob"), features(full(6))
    target = torch.arange(6) % 4
    losses = [F.cross_entropy(z, target) for z in votes_of(fusion, given).values()]
    close(fusion(given).logits.exp().sum(-1), torch.ones(6).double())
    assert F.cross_entropy(fusion(given).logits, target) <= sum(losses) / 3


def test_equal_trust_is_the_mean_and_over_classes_one_trust() -> None:
    weighted, mean = made("late_weighted"), made("late_mean")
    torch.nn.init.zeros_(weighted.theta)
    mean.load_state_dict({k: v for k, v in weighted.state_dict().items() if k != "theta"})
    given = features(patterns(3))
    close(weighted(given).logits, mean(given).logits)
    single, each = made("late_weighted"), made("late_weighted", per_class=True)
    state = single.state_dict()
    each.load_state_dict({**state, "theta": state["theta"].expand(-1, 4)})
    given = features(patterns(3))
    close(each(given).logits, single(given).logits)


def test_trust_is_renormalised_over_what_is_present() -> None:
    fusion = made("late_weighted")
    trust = fusion.theta[:, 0].softmax(0)
    weights = fusion(features(torch.tensor([[True, False, True]]))).weights[0]
    wanted = torch.stack([trust[0], 0 * trust[1], trust[2]]) / (trust[0] + trust[2])
    close(weights, wanted)


def test_product_of_experts_is_the_exact_posterior_of_independent_modalities() -> None:
    """Likelihoods p(x_m | c) and a prior: Bayes by hand, against experts that know p(c | x_m)."""
    torch.manual_seed(3)
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    likelihood = {m: torch.randn(5, 4).double() for m in WIDTHS}  # log p(x_m | c), five samples
    fusion = made("late_poe", dict.fromkeys(WIDTHS, 4))
    fusion.log_prior.copy_(prior.log())
    with torch.no_grad():
        for m in WIDTHS:
            eye = torch.eye(8, 4).double()
            fusion.project[m].weight.copy_(eye)
            fusion.project[m].bias.zero_()
            fusion.heads[m].weight.copy_(eye.T)
            fusion.heads[m].bias.zero_()
    mask = torch.ones(5, 1, dtype=torch.bool)
    posts = {m: (x + prior.log()).log_softmax(-1) for m, x in likelihood.items()}
    given = {m: Features(x[:, None], mask, x) for m, x in posts.items()}
    exact = (torch.stack(list(likelihood.values())).sum(0) + prior.log()).softmax(-1)
    close(fusion(given).logits.softmax(-1), exact)


def test_an_expert_without_an_opinion_is_neutral_and_one_alone_answers() -> None:
    fusion, given = made("late_poe"), features(full(3))
    with torch.no_grad():
        fusion.log_prior.fill_(-math.log(4))  # in double precision
        fusion.heads["text"].weight.zero_()
        fusion.heads["text"].bias.zero_()
    text = given["text"]
    without = {**given, "text": text._replace(mask=torch.zeros_like(text.mask))}
    close(fusion(given).logits, fusion(without).logits)
    nothing = fusion(features(torch.zeros(1, 3, dtype=torch.bool)))
    close(nothing.logits, fusion.log_prior[None])
    fusion = made("late_poe")
    given = features(torch.tensor([[False, False, True]]))
    close(fusion(given).logits, votes_of(fusion, given)["audio"].log_softmax(-1))


def test_the_geometric_mean_of_experts_is_late_mean_up_to_a_constant() -> None:
    experts, mean = made("late_poe", beta="mean"), made("late_mean")
    mean.load_state_dict({**experts.state_dict(), "prior_logits": torch.zeros(4)}, strict=False)
    given = features(patterns(3)[:-1])
    difference = experts(given).logits - mean(given).logits
    close(difference, difference.mean(-1, keepdim=True).expand_as(difference))


def test_an_attention_head_matches_torch() -> None:
    """One block against nn.MultiheadAttention with the same weights."""
    fusion, given = made("concat_transformer", num_layers=1), features(full(3))
    block = fusion.blocks[0]
    torch_attention = torch.nn.MultiheadAttention(8, 4, batch_first=True).double()
    own = block.attention
    torch_attention.load_state_dict(
        {
            "in_proj_weight": torch.cat([own.query.weight, own.key_value.weight]),
            "in_proj_bias": torch.cat([own.query.bias, own.key_value.bias]),
            "out_proj.weight": own.out.weight,
            "out_proj.bias": own.out.bias,
        }
    )
    tokens, masks = fusion.embedded(given)
    x, mask = torch.cat(list(tokens.values()), 1), torch.cat(list(masks.values()), 1)
    wanted, _ = torch_attention(x, x, x, key_padding_mask=~mask, need_weights=False)
    close(own(x, x, mask), wanted)


def test_attention_to_nothing_is_zero_and_to_one_token_independent_of_the_question() -> None:
    attention = made("concat_transformer").blocks[0].attention
    x = torch.randn(2, 3, 8).double()
    mask = torch.tensor([[True, True, True], [False, False, False]])
    out = attention(x, x, mask)
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()
    attention = made("cross_attention").blocks[0].attention
    context = torch.randn(1, 1, 8).double()
    out = attention(torch.randn(1, 5, 8).double(), context, torch.ones(1, 1, dtype=torch.bool))
    close(out, out[:, :1].expand_as(out))


def test_without_values_cross_attention_leaves_the_asking_stream_to_itself() -> None:
    fusion, given = made("cross_attention"), features(full(3))
    for block in fusion.blocks:
        torch.nn.init.zeros_(block.attention.out.weight)
        torch.nn.init.zeros_(block.attention.out.bias)
    other = given["text"]._replace(tokens=given["text"].tokens + 1)
    close(fusion({**given, "text": other}).logits, fusion(given).logits)


def stream_gradient(fusion: Fusion) -> float:
    """How much the other modality's stream depends on the image's tokens."""
    given = features(full(2))
    x = given["image"].tokens.requires_grad_()
    fusion.null.data.zero_()
    captured: list[Tensor] = []
    last = fusion.streams["text"][-1]
    handle = last.register_forward_hook(lambda _m, _i, out: captured.append(out))
    fusion({**given, "image": given["image"]._replace(tokens=x)})
    handle.remove()
    length = given["text"].tokens.shape[1]
    (gradient,) = torch.autograd.grad(captured[0][:, :length].sum(), x, allow_unused=True)
    return 0.0 if gradient is None else gradient.abs().max().item()


def test_a_bottleneck_needs_two_fusion_layers_to_carry_anything() -> None:
    assert stream_gradient(made("mbt", num_layers=3, fusion_layer=3)) == 0
    assert stream_gradient(made("mbt", num_layers=3, fusion_layer=2)) == 0
    assert stream_gradient(made("mbt", num_layers=3, fusion_layer=1)) > 1e-6


def test_mbt_without_fusion_layers_is_the_mean_of_unimodal_transformers() -> None:
    fusion, given = made("mbt", num_layers=2, fusion_layer=2), features(full(4))
    means = []
    tokens, masks = fusion.embedded(given)
    for m, x in tokens.items():
        for block in fusion.streams[m]:
            x = block(x, masks[m])
        normed = fusion.norm(x)
        rows = [normed[b][masks[m][b]].mean(0) for b in range(4)]
        means.append(torch.stack(rows))
    close(fusion(given).embedding, torch.stack(means).mean(0))
