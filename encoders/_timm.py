"""timm models without their classifier, and their feature maps as tokens.

Shapes: `B` batch, `H` x `W` pixels, `T` cells of the final feature map or patches, `D` width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import Features, masked_mean

from .weights import from_hub


@contextmanager
def without(package: str) -> Iterator[None]:
    """Let imports of an optional package fail for a moment.

    timm imports wandb, where that is installed, for a helper of its own training script: a second.
    """
    loaded = package in sys.modules
    if not loaded:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not loaded:
            del sys.modules[package]


def build_timm(model: str, pretrained: bool, **settings: Any) -> Any:
    """Build a timm model without its classifier."""
    with without("wandb"):
        import timm

    if not timm.is_model(model.partition(".")[0]):
        near = did_you_mean(model, timm.list_models())
        raise FusionZooError(f"timm has no model {model!r}.{near} timm.list_models() lists them.")

    def build(pretrained: bool) -> Any:
        return timm.create_model(model, pretrained=pretrained, num_classes=0, **settings)

    try:
        net = build(False)
    except (TypeError, RuntimeError, ValueError) as error:
        raise FusionZooError(f"timm cannot build {model!r} with {settings}: {error}") from error
    return from_hub(f"timm/{model}", lambda: build(True)) if pretrained else net


def timm_features(net: Any, x: Tensor) -> Features:
    """Return tokens, an all-True mask and the model's own pooling."""
    found = net.forward_features(x)
    if not isinstance(found, Tensor) or found.ndim not in (3, 4):
        raise FusionZooError(f"timm's {type(net).__name__} gives no single feature map")
    tokens = timm_tokens(net, found)
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if net.head_hidden_size == net.num_features:
        return Features(tokens, mask, net.forward_head(found, pre_logits=True))
    return Features(tokens, mask, masked_mean(tokens, mask))


def channels_last(net: Any) -> bool:
    """Whether a timm model's feature map is (B, H, W, D), as Swin's."""
    return str(getattr(net, "output_fmt", "NCHW")).endswith("NHWC")


def timm_tokens(net: Any, found: Tensor) -> Tensor:
    """Arrange a feature map, channels first or last, or a token sequence as (B, T, D)."""
    if found.ndim == 3:
        return found[:, getattr(net, "num_prefix_tokens", 0) :]
    layout = "b h w d" if channels_last(net) else "b d h w"
    return rearrange(found, f"{layout} -> b (h w) d")
