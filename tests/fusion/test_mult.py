"""`mult` is what its paper's equations say, and its batched stacks are the same stacks in loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusionzoo.fusion.attention.mult import (
    MulT,
    Stacks,
    Weights,
    group_by_size,
    last_step,
    positions,
    with_positions,
)
from fusionzoo.structures import Features
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, made

Given = dict[str, Features]


# ---- the encoder of Tsai et al. 2019, sections 3.1 and 3.2, one sample and one head at a time


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


def by_the_paper(fusion: MulT, x: Given, sample: int) -> Tensor:
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


def even(presence: Tensor, count: int) -> Given:
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
