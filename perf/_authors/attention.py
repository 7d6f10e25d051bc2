"""Fusions by attention beside their authors' modules."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.fusion.attention.mult import positions

from .case import CLASSES, DIM, WIDTHS, Answer, Case, Copied, Given


def stacks(*encoders: Any) -> Given:
    """Write transformers of MulT as one stack of ours."""
    tensors: Given = {}
    for i, layers in enumerate(zip(*(encoder.layers for encoder in encoders), strict=True)):
        for name, path in {"norm": "layer_norms.0", "mlp_norm": "layer_norms.1"}.items():
            norms = [layer.get_submodule(path) for layer in layers]
            tensors[f"layers.{i}.{name}"] = torch.cat([x.weight for x in norms])
            tensors[f"layers.{i}.{name}_bias"] = torch.cat([x.bias for x in norms])
        attentions = [layer.self_attn for layer in layers]
        width = attentions[0].embed_dim
        pairs = {
            "query": [(x.in_proj_weight[:width], x.in_proj_bias[:width]) for x in attentions],
            "key_value": [(x.in_proj_weight[width:], x.in_proj_bias[width:]) for x in attentions],
            "out": [(x.out_proj.weight, x.out_proj.bias) for x in attentions],
            "wide": [(layer.fc1.weight, layer.fc1.bias) for layer in layers],
            "narrow": [(layer.fc2.weight, layer.fc2.bias) for layer in layers],
        }
        for name, pieces in pairs.items():
            tensors[f"layers.{i}.{name}"] = torch.stack([weight.mT for weight, _ in pieces])
            tensors[f"layers.{i}.{name}_bias"] = torch.cat([bias for _, bias in pieces])
    tensors["norm.norm"] = torch.cat([encoder.layer_norm.weight for encoder in encoders])
    tensors["norm.norm_bias"] = torch.cat([encoder.layer_norm.bias for encoder in encoders])
    return tensors


class Positions(nn.Module):
    """Give MulT the positions of ours: (B, T) -> (B, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return positions(torch.ones_like(x, dtype=torch.bool), self.width, x)


def mult(_: ModuleType, module: Any, tokens: list[Tensor], __: Tensor) -> Answer:
    """Answer with the authors' positions and with ours."""
    encoders = [x for x in module.children() if hasattr(x, "embed_positions")]
    for encoder in encoders:  # today's torch keeps the strides of a copy, which they `view`
        encoder.embed_positions.register_forward_pre_hook(lambda _, x: (x[0].contiguous(),))
    their_positions = module(*tokens)[0]
    for encoder in encoders:
        encoder.embed_positions = Positions(encoder.embed_dim)
    equal_positions = module(*tokens)[0]
    return {"embedding": their_positions, "embedding with equal positions": equal_positions}


def join(layer: nn.Linear) -> Given:
    """Write a last layer as ours, which also reads a presence bit of each modality."""
    zeros = layer.weight.new_zeros(len(layer.weight), len(WIDTHS))
    return {"weight": torch.cat([layer.weight, zeros], dim=1), "bias": layer.bias}


NARROW = (20, 24, 12)  # its code leaves out the projection of a modality as wide as the streams
MULT_SETTINGS = SimpleNamespace(
    **{f"orig_d_{x}": width for x, width in zip("lav", NARROW, strict=True)},
    **dict.fromkeys(("vonly", "aonly", "lonly"), True),
    **dict.fromkeys(("attn_dropout", "attn_dropout_a", "attn_dropout_v", "relu_dropout"), 0.0),
    **dict.fromkeys(("res_dropout", "out_dropout", "embed_dropout"), 0.0),
    **{"num_heads": 5, "layers": 3, "attn_mask": False, "output_dim": DIM},
)


def healnet_step(*parts: Any) -> Given:
    """Write pairs of an attention and an MLP, both after a norm, as steps of ours."""
    modules = {
        "norm": "0.norm",
        "context_norm": "0.norm_context",
        "query": "0.fn.to_q",
        "key_value": "0.fn.to_kv",
        "out": "0.fn.to_out.0",
        "mlp_norm": "1.norm",
        "wide": "1.fn.net.0",
        "narrow": "1.fn.net.2",
    }
    pair = nn.ModuleList(parts)
    return {
        f"{name}.{key}": x
        for name, path in modules.items()
        for key, x in pair.state_dict().items()
        if key.startswith(f"{path}.")
        for key in [key.removeprefix(f"{path}.")]
    }


def healnet(code: ModuleType) -> nn.Module:
    return code.HealNet(
        n_modalities=len(WIDTHS),
        channel_dims=[*WIDTHS],
        num_spatial_axes=[1] * len(WIDTHS),
        out_dims=CLASSES,
        depth=2,
        l_c=6,
        l_d=DIM,
        x_heads=4,
        l_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
        fourier_encode_data=False,
    )


def listed(_: ModuleType, module: Any, inputs: list[Tensor], __: Tensor) -> Answer:
    return {"logits": module(inputs)}


def momke_layer(layer: Any) -> Given:
    """Write a layer of an expert as ours, which joins keys and values."""
    key_value = {
        f"key_value.{name}": torch.cat([getattr(layer.k, name), getattr(layer.v, name)])
        for name in ("weight", "bias")
    }
    query = {f"query.{name}": x for name, x in layer.q.named_parameters()}
    return query | key_value | {f"mlp.{name}": x for name, x in momke_mlp(layer.mlp).items()}


def momke_mlp(mlp: Any) -> Given:
    pairs = {"0": mlp.fc1, "2": mlp.fc2}
    return {f"{n}.{name}": x for n, part in pairs.items() for name, x in part.named_parameters()}


def momke(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    """Run one time step of a conversation."""
    present = torch.ones(1, len(vectors[0]), len(vectors))
    answer = module(torch.cat(vectors, dim=1)[None], present, present[0, :, :1])
    return {"embedding": answer[1][:, 0]}


MOMKE_SETTINGS = SimpleNamespace(device="cpu", drop_rate=0.0)
ATTENTION = (
    Case(
        "mult",
        "yaohungt/Multimodal-Transformer",
        "src/models.py",
        lambda code: code.MULTModel(MULT_SETTINGS),
        mult,
        {
            "embed.{m}": Copied(("proj_{letter}",), lambda x: {"weight": x.weight[..., 0]}),
            "crossmodal": Copied(
                tuple(f"trans_{m}_with_{n}" for m in "lav" for n in "lav" if m != n), stacks
            ),
            "memory.{m}": Copied(("trans_{letter}_mem",), stacks),
            "mlp.0": "proj1",
            "mlp.3": "proj2",
            "join": Copied(("out_layer",), join),
        },
        widths=NARROW,
        lengths=(7, 4, 9),
        settings={"num_layers": 3, "memory_layers": 3},
        letters="lav",
    ),
    Case(
        "healnet",
        "konst-int-i/healnet",
        "healnet/models/healnet.py",
        healnet,
        listed,
        {
            "latents": "latents",
            **{
                f"read.{i}.{m}": Copied(
                    (f"layers.{i}.{2 * m}", f"layers.{i}.{2 * m + 1}"), healnet_step
                )
                for i in (0, 1)
                for m in range(len(WIDTHS))
            },
            **{
                f"think.{i}": Copied((f"layers.{i}.6.0", f"layers.{i}.6.1"), healnet_step)
                for i in (0, 1)
            },
            "norm": "to_logits.1",
            "head": "to_logits.2",
        },
        lengths=(7, 4, 9),
        settings={"num_latents": 6, "head_dim": 8, "self_attention": True},
    ),
    Case(
        "momke",
        "wxxv/MoMKE",
        "MoMKE/model_expert_softmoe.py",
        lambda code: code.MoMKE(MOMKE_SETTINGS, *WIDTHS, DIM, DIM, depth=2, num_heads=2),
        momke,
        {
            "project.{m}": "{letter}_in_proj.0",
            **{
                f"experts.{{m}}.{i}": Copied(
                    (f"block.blocks.{i}.Transformer_{{letter}}",), momke_layer
                )
                for i in (0, 1)
            },
            "router.{m}": Copied(("router_{letter}",), momke_mlp),
            "mix": "proj1",
            "join": "nlp_head",
        },
        settings={"num_layers": 2, "dropout": 0.0},
        letters="atv",
    ),
)
