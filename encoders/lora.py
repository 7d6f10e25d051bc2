"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) in an encoder's attention, by `peft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .layers import norms

DEFAULTS: dict[str, Any] = {"r": 8, "alpha": 16, "dropout": 0.0, "targets": None}
# The projections to queries and values, under the names that the libraries give them.
ATTENTION = (
    ("qkv",),  # timm
    ("query", "value"),  # BERT, AST
    ("q_proj", "v_proj"),  # wav2vec 2.0, Whisper, CLIP
    ("q_lin", "v_lin"),  # DistilBERT
    ("query_proj", "value_proj"),  # DeBERTa
    ("Wqkv",),  # ModernBERT
    ("q", "v"),  # T5
    ("c_attn",),  # GPT-2
)


def add_lora(encoder: nn.Module, settings: Mapping[str, Any], name: str) -> list[nn.Module]:
    """Freeze an encoder, put adapters in it, and return what must stay in evaluation mode.

    `r` is their rank, `alpha / r` their scale, `targets` the names of the layers that get one; by
    default the attention's projections to queries and values. The network stays what it is: only
    the chosen layers are wrapped. At first the adapters change nothing.
    """
    if not isinstance(settings, Mapping):
        raise FusionZooError(f"{name} holds settings: give {name}.r {DEFAULTS['r']}")
    for key in settings:
        if key not in DEFAULTS:
            raise FusionZooError(
                f"{name}.{key}: lora has no such setting.{did_you_mean(key, DEFAULTS)}"
                f" It has: {', '.join(DEFAULTS)}."
            )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise FusionZooError(f"{name} needs peft: pip install 'fusionzoo[lora]'") from error
    chosen = {**DEFAULTS, **settings}
    net = getattr(encoder, "net", encoder)
    targets = chosen["targets"] or _attention(net, name)
    encoder.requires_grad_(False)
    try:
        config = LoraConfig(
            r=chosen["r"],
            lora_alpha=chosen["alpha"],
            lora_dropout=chosen["dropout"],
            target_modules=[targets] if isinstance(targets, str) else [str(x) for x in targets],
        )
        inject_adapter_in_model(config, net)
    except (ValueError, TypeError) as error:
        raise FusionZooError(f"{name}: {one_line(error)}") from error
    return norms(encoder)


def _attention(net: nn.Module, name: str) -> tuple[str, ...]:
    own = {key.rpartition(".")[2] for key, _ in net.named_modules()}
    for targets in ATTENTION:
        if own.issuperset(targets):
            return targets
    raise FusionZooError(
        f"{name}: {type(net).__name__} has no attention that lora knows;"
        f" {name}.targets [<layer>, ...] names linear layers by the end of their names"
    )
