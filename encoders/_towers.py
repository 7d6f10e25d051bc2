"""Towers of joint models (CLIP, SigLIP, CLAP), which put modalities into one space.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError

from ._hugging_face import JOINT, aligned, build_model, load_auto, load_model

# By kind, how transformers calls the parts of a joint model: tower, projection, configuration.
PARTS = {
    "image": ("vision_model", "visual_projection", "vision_config"),
    "text": ("text_model", "text_projection", "text_config"),
    "audio": ("audio_model", "audio_projection", "audio_config"),
}
_models: ContextVar[dict[str, Any] | None] = ContextVar("joint_models", default=None)


@contextmanager
def shared_checkpoints() -> Iterator[None]:
    """In the block, read the checkpoint of a joint model once for all of its towers."""
    if _models.get() is not None:
        yield
        return
    token = _models.set({})
    try:
        yield
    finally:
        _models.reset(token)


class Tower(nn.Module):
    """One tower of a joint model, and its projection into the space that the towers share.

    Tokens take the path of the pooled vector, so that both have one width.

    Shapes: inputs of the tower -> tokens (B, T, D), pooled (B, D)
    """

    def __init__(self, model: Any, kind: str, projects: bool) -> None:
        super().__init__()
        part, projection, _ = PARTS[kind]
        self.kind, self.family = kind, model.config.model_type
        self.joint_config = model.config  # of all towers
        self.model = getattr(model, part)
        self.projection = getattr(model, projection, None) if projects else None
        if not projects and self.family == "siglip" and kind == "text":
            self.model.head = nn.Identity()  # SigLIP's projection
        self.projects = projects

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        output = self.model(**inputs)
        tokens, pooled = output.last_hidden_state, output.pooler_output
        if tokens.ndim == 4:  # CLAP's Swin transformer
            tokens = rearrange(tokens, "b d f t -> b (f t) d")
        tokens = self._normalised(tokens)
        if self.projects and self.family == "siglip" and self.kind == "text":
            return self.model.head(tokens), pooled
        if self.projection is None:
            return tokens, pooled
        if self.family == "clap" and self.kind == "text":
            tokens = self.model.pooler.activation(self.model.pooler.dense(tokens))
        tokens, pooled = self.projection(tokens), self.projection(pooled)
        return tokens, F.normalize(pooled, dim=-1) if self.family == "clap" else pooled

    def _normalised(self, tokens: Tensor) -> Tensor:
        """Apply the last layer norm where transformers applies it to the class token alone."""
        if self.kind == "image" and self.family in ("clip", "metaclip_2"):
            normalised: Tensor = self.model.post_layernorm(tokens)
            return normalised
        return tokens


def load_tower(source: str, kind: str, pretrained: bool, projects: bool = True) -> Tower:
    """Load one tower of a joint model, or build it from the configuration with random weights."""
    config = load_auto("AutoConfig", source)
    _check(config, source, kind)
    if not pretrained:
        tower = Tower(build_model(source, _with_one_tower(config, kind)), kind, projects)
        tower.joint_config = config
        return tower
    models = _models.get()
    models = {} if models is None else models
    if source not in models:
        models[source] = load_model(source, True)
    model, part = models[source], PARTS[kind][0]
    # A tower leaves the model, so a second one of its kind, with weights of its own, is read anew.
    if getattr(model, part) is None:
        model = models[source] = load_model(source, True)
    tower = aligned(Tower(model, kind, projects))
    setattr(model, part, None)
    return tower


def _check(config: Any, source: str, kind: str) -> None:
    if config.model_type not in JOINT:
        raise FusionZooError(
            f"{source} is a {config.model_type}, not a joint model of one of the types"
            f" {', '.join(JOINT)}; hf/ takes models of one modality"
        )
    if kind not in PARTS or not hasattr(config, PARTS[kind][2]):
        kinds = [name for name, parts in PARTS.items() if hasattr(config, parts[2])]
        raise FusionZooError(
            f"{source} is a {config.model_type}: it encodes {' and '.join(kinds)}, not {kind}"
        )


def _with_one_tower(config: Any, kind: str) -> Any:
    """Return a joint model's configuration with the other towers, which are dropped, made small."""
    config = copy.deepcopy(config)
    for name, (_, _, part) in PARTS.items():
        other = getattr(config, part, None)
        if name == kind or other is None or name == "audio":  # CLAP's is small as it is
            continue
        other.num_hidden_layers = 1
        if name == "text":
            other.vocab_size = max(other.pad_token_id or 0, 0) + 1
    return config
