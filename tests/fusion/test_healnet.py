"""`healnet`: steps that are skipped, sets of tokens, and the cost of a layer."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fusionzoo.structures import Features, keep_only
from fusionzoo.testing.fusions import features, full
from helpers.oracle import WIDTHS, close, copy, made


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
