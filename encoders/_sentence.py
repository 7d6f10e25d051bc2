"""Pooling, dense layers and normalisation of sentence-transformers folders, without the package.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import masked_mean

from ._checkpoint_files import read_weights
from ._hugging_face import find_file
from ._sentence_config import LIBRARY_MODES, SentenceConfig


class SentenceHead(nn.Module):
    """Pool tokens, then apply the folder's dense layers and normalisation.

    Dense layers also apply to the tokens, which are thus as wide as the pooled vector.
    """

    def __init__(self, config: SentenceConfig, source: str, dim: int, pretrained: bool) -> None:
        super().__init__()
        self.config, self.dim = config, dim
        self.stages = nn.ModuleList()
        for (kind, settings), folder in zip(config.stages, config.stage_folders, strict=True):
            if kind != "Dense":
                self.stages.append(Normalise())
                continue
            if settings["in_features"] != self.dim:
                raise FusionZooError(
                    f"{source}: the layer in {folder!r} reads {settings['in_features']} values, and"
                    f" {self.dim} come before it"
                )
            dense = Dense(settings)
            if pretrained:
                dense.load(source, folder)
            self.stages.append(dense)
            self.dim = settings["out_features"]

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        pooled = pool(tokens, mask, self.config.pooling)
        for stage in self.stages:
            pooled = stage(pooled)
            tokens = stage(tokens) if isinstance(stage, Dense) else tokens
        return tokens, pooled

    def save(self, folder: Path) -> None:
        """Write the files that `read_sentence_config` reads, without weights."""
        library = "sentence_transformers.models"
        modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
        modules += [(kind, f"{i}_{kind}") for i, (kind, _) in enumerate(self.config.stages, 2)]
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"{library}.{kind}"}
            for i, (kind, path) in enumerate(modules)
        ]
        library_mode = next(key for key, x in LIBRARY_MODES.items() if x == self.config.pooling)
        settings = {"do_lower_case": self.config.lower_case}
        files: dict[str, Any] = {
            "modules.json": listed,
            "1_Pooling/config.json": {"pooling_mode": library_mode},
            "sentence_bert_config.json": settings | {"max_seq_length": self.config.max_length},
            "config_sentence_transformers.json": {
                "prompts": {"default": self.config.prompt},
                "default_prompt_name": "default",
            },
        }
        for (kind, stage), (_, path) in zip(self.config.stages, modules[2:], strict=True):
            if kind == "Dense":
                files[f"{path}/config.json"] = dict(stage)
        for name, contents in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(contents, indent=1), encoding="utf-8")


class Normalise(nn.Module):
    """Scale vectors to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class Dense(nn.Module):
    """A linear layer and its activation, (..., in_features) -> (..., out_features)."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(
            settings["in_features"], settings["out_features"], bias=settings["bias"]
        )
        self.activation = getattr(nn, settings["activation_function"])()

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.linear(x))
        return activated

    def load(self, source: str, folder: str) -> None:
        names = ("model.safetensors", "pytorch_model.bin")
        paths = [find_file(source, f"{folder}/{name}") for name in names]
        path = next((path for path in paths if path is not None), None)
        if path is None:
            raise FusionZooError(f"{source}: {folder}/{names[0]} is missing")
        stored = {key: x.float() for key, x in read_weights(path).tensors.items()}
        try:
            self.load_state_dict(stored, strict=True)
        except RuntimeError:
            shapes = {key: tuple(x.shape) for key, x in stored.items()}
            raise FusionZooError(f"{path} does not fit {folder}/config.json: {shapes}") from None


def pool(tokens: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Pool the real tokens, (B, T, D), (B, T) -> (B, D); they come before the padding."""
    if mode == "mean":
        return masked_mean(tokens, mask)
    if mode == "cls":
        return tokens[:, 0]
    if mode == "max":
        return tokens.masked_fill(~mask[..., None], float("-inf")).amax(1)
    counts = mask.sum(1).clamp(min=1)
    if mode == "last":
        return tokens[torch.arange(len(tokens), device=tokens.device), counts - 1]
    if mode == "mean_sqrt_len":
        return masked_mean(tokens, mask) * counts[:, None].to(tokens.dtype).sqrt()
    weights = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * mask
    weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).to(tokens.dtype)
    return torch.einsum("btd,bt->bd", tokens.masked_fill(~mask[..., None], 0), weights)
