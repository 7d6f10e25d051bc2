"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) in an encoder, made by `peft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .layers import norms

DEFAULTS: dict[str, Any] = {"r": 8, "alpha": 16, "dropout": 0.0, "targets": None}
# Names of the projections to queries and values in different libraries.
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
    """Freeze an encoder, add adapters, and return the modules that stay in evaluation mode.

    Settings are `r`, the adapters' rank, `alpha`, with a scale of `alpha / r`, `dropout`, and
    `targets`, the names of the layers that get one; by default the attention's projections to
    queries and values. The adapters start as zero. `name` is the setting's name in errors.
    """
    if not isinstance(settings, Mapping):
        raise FusionZooError(f"{name} is a group of settings: give {name}.r {DEFAULTS['r']}")
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
    values = {**DEFAULTS, **settings}
    net = getattr(encoder, "net", encoder)
    targets = values["targets"] or _attention_projections(net, name)
    encoder.requires_grad_(False)
    try:
        config = LoraConfig(
            r=values["r"],
            lora_alpha=values["alpha"],
            lora_dropout=values["dropout"],
            target_modules=[targets] if isinstance(targets, str) else [str(x) for x in targets],
        )
        inject_adapter_in_model(config, net)
    except (ValueError, TypeError) as error:
        raise FusionZooError(f"{name}: {one_line(error)}") from error
    return norms(encoder)


def _attention_projections(net: nn.Module, name: str) -> tuple[str, ...]:
    layers = {key.rpartition(".")[2] for key, _ in net.named_modules()}
    for targets in ATTENTION:
        if layers.issuperset(targets):
            return targets
    raise FusionZooError(
        f"{name}: {type(net).__name__} has no attention layers under known names;"
        f" {name}.targets [<layer>, ...] names linear layers by the end of their names"
    )
