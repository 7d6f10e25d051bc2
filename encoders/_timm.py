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
    """Make imports of an optional package fail inside the block.

    timm imports wandb if it is installed, only for its own training script, which takes a second.
    """
    was_imported = package in sys.modules
    if not was_imported:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not was_imported:
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
    """Return tokens, an all-True mask and the model's own pooled vector.

    Where that is not as wide as the tokens, the tokens' mean replaces it.
    """
    feature_map = net.forward_features(x)
    if not isinstance(feature_map, Tensor) or feature_map.ndim not in (3, 4):
        raise FusionZooError(f"timm's {type(net).__name__} gives no single feature map")
    tokens = timm_tokens(net, feature_map)
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if net.head_hidden_size == net.num_features:
        return Features(tokens, mask, net.forward_head(feature_map, pre_logits=True))
    return Features(tokens, mask, masked_mean(tokens, mask))


def channels_last(net: Any) -> bool:
    """Return whether a timm model's feature map is (B, H, W, D), like Swin's."""
    return str(getattr(net, "output_fmt", "NCHW")).endswith("NHWC")


def timm_tokens(net: Any, feature_map: Tensor) -> Tensor:
    """Arrange a feature map as tokens (B, T, D); a sequence loses its class tokens."""
    if feature_map.ndim == 3:
        return feature_map[:, getattr(net, "num_prefix_tokens", 0) :]
    layout = "b h w d" if channels_last(net) else "b d h w"
    return rearrange(feature_map, f"{layout} -> b (h w) d")
