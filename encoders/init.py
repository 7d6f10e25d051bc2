"""Weight initialisation by layer type, for encoders that are trained from scratch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean

SCHEMES: dict[str, Callable[..., Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_normal": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "normal": partial(nn.init.normal_, std=0.02),
    "constant": partial(nn.init.constant_, val=0.0),
}
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@torch.no_grad()
def initialise(module: nn.Module, scheme: str = "default", **settings: Any) -> nn.Module:
    """Initialise `module` in place and return it.

    `scheme` is `default`, which changes nothing, or sets the weights of linear and convolution
    layers: xavier_* (Glorot & Bengio 2010), kaiming_* (He et al. 2015), orthogonal (Saxe et al.
    2014), trunc_normal and normal (std 0.02), constant (0). It also sets biases to 0, norms to
    weight 1 and bias 0, and draws embeddings from a normal distribution with std 0.02. `settings`
    go to the scheme, e.g. `std=0.01`, `gain=2.0`, `val=0.1`.

    >>> layer = initialise(nn.Linear(2, 2), "constant", val=0.5)
    >>> layer.weight.tolist(), layer.bias.tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [0.0, 0.0])
    """
    if scheme == "default":
        return module
    if scheme not in SCHEMES:
        known = ", ".join(["default", *SCHEMES])
        raise FusionZooError(
            f"unknown init {scheme!r}.{did_you_mean(scheme, SCHEMES)} There are: {known}."
        )
    for layer in module.modules():
        if isinstance(layer, WEIGHTED):
            SCHEMES[scheme](layer.weight, **settings)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, NORMS) and layer.weight is not None:
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
        elif isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            SCHEMES[scheme](layer.in_proj_weight, **settings)
            nn.init.zeros_(layer.in_proj_bias)
    return module
