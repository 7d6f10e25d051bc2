"""`multiway`: shared attention and separate experts, and the models that it contains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionzoo.fusion.attention._blocks import TransformerBlock, join
from fusionzoo.structures import keep_only, masked_mean
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, made


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
