"""Pooling, dense layers and normalisation of sentence-transformers folders, without the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import masked_mean

from .hf import find_file, read_json
from .weights import read_weights

MODES = ("mean", "cls", "max", "last", "mean_sqrt_len", "weighted_mean")
LIBRARY_MODES = {  # names in `1_Pooling/config.json`, those of older versions last
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU")
# Names that sentence-transformers gave the settings of its transformer over the years.
SETTINGS_FILES = [
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
MOST_MODULES = 16
MOST_FEATURES = 1 << 16  # width of a dense layer


@dataclass(frozen=True)
class SentenceConfig:
    """How a sentence-transformers folder prepares texts and pools the transformer's output."""

    transformer: str  # folder within the folder, often empty
    pooling: str  # of `MODES`
    stages: tuple[tuple[str, Mapping[str, Any]], ...]  # after pooling: type and settings
    stage_folders: tuple[str, ...]
    max_length: int | None
    lower_case: bool
    prompt: str  # put before each text

    @property
    def facts(self) -> dict[str, Any]:
        """What determines the features beside the weights, for the key of cached features."""
        stages = [[name, dict(settings)] for name, settings in self.stages]
        facts = {"pooling": self.pooling, "stages": stages, "max_length": self.max_length}
        return facts | {"lower_case": self.lower_case, "prompt": self.prompt}


def read_sentence_config(source: str) -> SentenceConfig | None:
    """Read `modules.json` and what it names; None where a model has no such file."""
    file = find_file(source, "modules.json")
    if file is None:
        return None
    modules = _modules(file)
    if [name for name, _ in modules[:2]] != ["Transformer", "Pooling"]:
        raise FusionZooError(
            f"{file}: only a Transformer followed by Pooling is supported, found"
            f" {' -> '.join(name for name, _ in modules)}"
        )
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        path = find_file(source, f"{modules[0][1]}/{name}".lstrip("/"))
        if path is not None:
            settings = _mapping(path)
            break
    pooling = _required(source, modules[1][1], file)
    prompt = _prompt(source)
    if prompt and _mapping(pooling).get("include_prompt") is False:
        raise FusionZooError(f"{pooling}: include_prompt=false is not supported")
    length = settings.get("max_seq_length")
    return SentenceConfig(
        modules[0][1],
        _pooling(pooling),
        tuple((name, _stage(source, name, folder, file)) for name, folder in modules[2:]),
        tuple(folder for _, folder in modules[2:]),
        length if isinstance(length, int) and length > 0 else None,
        bool(settings.get("do_lower_case")),
        prompt,
    )


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return type and folder of each module; folders lie below the model's."""
    listed = read_json(file)
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_MODULES:
        raise FusionZooError(f"{file} must list 1 to {MOST_MODULES} modules")
    modules = []
    for module in listed:
        fields = module if isinstance(module, dict) else {}
        kind, folder = fields.get("type"), fields.get("path", "")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise FusionZooError(f"{file}: a module must have a type and a path, found {module!r}")
        if Path(folder).is_absolute() or ".." in Path(folder).parts or "\0" in folder:
            raise FusionZooError(f"{file}: path {folder!r} leaves the folder")
        modules.append((kind.rpartition(".")[2], folder))
    return modules


def _mapping(path: Path) -> dict[str, Any]:
    contents = read_json(path)
    if not isinstance(contents, dict):
        raise FusionZooError(f"{path} must hold a JSON object")
    return contents


def _required(source: str, folder: str, file: Path) -> Path:
    path = find_file(source, f"{folder}/config.json".lstrip("/"))
    if path is None:
        raise FusionZooError(f"{file} names {folder!r}, and {folder}/config.json is missing")
    return path


def _prompt(source: str) -> str:
    path = find_file(source, "config_sentence_transformers.json")
    config = {} if path is None else _mapping(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return prompt if isinstance(prompt, str) else ""


def _pooling(path: Path) -> str:
    """Return the pooling of a `1_Pooling/config.json`, in any version's form."""
    config = _mapping(path)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [key for key in LIBRARY_MODES if config.get(key) is True]
    modes = modes if isinstance(modes, list) else [modes]
    known = [LIBRARY_MODES[mode] for mode in modes if mode in LIBRARY_MODES]
    if len(known) == len(modes) == 1:
        return known[0]
    raise FusionZooError(
        f"{path}: pooling by {' and '.join(map(str, modes)) or 'nothing'} is not supported:"
        f" pooling= one of {', '.join(MODES)} pools without the folder's own layers"
    )


def _stage(source: str, kind: str, folder: str, file: Path) -> Mapping[str, Any]:
    """Return the settings of a module after pooling."""
    if kind == "Normalize":
        return {}
    if kind != "Dense":
        raise FusionZooError(
            f"{file}: a module {kind} is not supported, only Dense and Normalize; pooling=mean"
            " pools without the folder's own layers"
        )
    path = _required(source, folder, file)
    config = _mapping(path)
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if not all(isinstance(size, int) and 0 < size <= MOST_FEATURES for size in sizes):
        raise FusionZooError(f"{path}: in_features and out_features must be 1 to {MOST_FEATURES}")
    elsewhere = {config.get(f"module_{x}put_name") for x in ("in", "out")} - {
        *(None, "sentence_embedding")
    }
    if activation not in ACTIVATIONS or config.get("use_residual") or elsewhere:
        raise FusionZooError(
            f"{path}: only a plain layer with one of {', '.join(ACTIVATIONS)} is supported"
        )
    bias = bool(config.get("bias", True))
    names = ("in_features", "out_features", "bias", "activation_function")
    return dict(zip(names, (*sizes, bias, activation), strict=True))


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
        return tokens[torch.arange(tokens.shape[0], device=tokens.device), counts - 1]
    if mode == "mean_sqrt_len":
        return masked_mean(tokens, mask) * counts[:, None].to(tokens.dtype).sqrt()
    weights = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * mask
    weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).to(tokens.dtype)
    return torch.einsum("btd,bt->bd", tokens.masked_fill(~mask[..., None], 0), weights)
