"""Loading through transformers, without ever running code from a model's folder; joint models."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, explained, one_line
from fusionzoo.structures import evaluating

from ._torchaudio import broken_torchaudio, torchaudio_or_none
from .base import called_modules
from .weights import from_hub, resolve

M = TypeVar("M", bound=nn.Module)
JOINT = ("clip", "metaclip_2", "siglip", "clap")  # types whose tokens we know how to project
MAX_JSON = 1 << 20  # bytes
CUSTOM_CODE = (
    "needs custom code of its own, which is never run: take a model whose architecture is part of"
    " transformers"
)
_log = logging.getLogger("fusionzoo")
# By kind, how transformers calls the parts of a joint model: tower, projection, configuration.
PARTS = {
    "image": ("vision_model", "visual_projection", "vision_config"),
    "text": ("text_model", "text_projection", "text_config"),
    "audio": ("audio_model", "audio_projection", "audio_config"),
}
_models: ContextVar[dict[str, Any] | None] = ContextVar("joint_models", default=None)


def find_source(model: str, assets: Path | None) -> str:
    """Return the folder that `assets` or the model's name refer to, else its name on the hub.

    A model folder without these assets is an error: loading it must not ask a hub.
    """
    if assets is not None and not assets.is_dir():
        raise FusionZooError(f"{assets} is missing: the model folder is not complete")
    folder = assets or resolve(model)
    return str(folder) if folder.exists() else model


def join_source(source: str, folder: str) -> str:
    """Return the source of a model that lies in a folder of another one."""
    if not folder:
        return source
    if not Path(source).is_dir():
        raise FusionZooError(
            f"the model of {source} lies in its folder {folder!r}: download it, and name the local"
            " folder, hf/<folder>"
        )
    return str(Path(source) / folder)


def refuse_joint(source: str, model: str) -> None:
    """Refuse a model of several modalities, such as CLIP, where an encoder of text is wanted."""
    config = load_auto("AutoConfig", source)
    if hasattr(config, "text_config") and any(
        hasattr(config, f"{part}_config") for part in ("vision", "image", "audio")
    ):
        way_out = f": hf-clip/{model} takes the tower of one" if joint_kinds(config) else ""
        raise FusionZooError(
            f"hf/{model} is a model of several modalities ({config.model_type}){way_out}"
        )


def joint_kinds(config: Any) -> list[str]:
    """Return the kinds that a joint model has towers of, by transformers' `get_*_features`.

    A model of pictures or sounds and language, such as Qwen-VL, reads texts with its decoder.
    """
    model = model_class(config)
    kinds = [kind for kind in PARTS if hasattr(model, f"get_{kind}_features")]
    if kinds and "text" not in kinds and hasattr(config, "text_config"):
        kinds.append("text")
    return kinds if "text" in kinds and len(kinds) > 1 else []


def model_class(config: Any) -> Any:
    """Return the class that `AutoModel` builds of a configuration, None if there is none."""
    from transformers import AutoModel

    return AutoModel._model_mapping.get(type(config), None)


def run_part(model: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
    """Run the part of a joint model that encodes one kind."""
    if hasattr(model, f"get_{kind}_features"):
        return getattr(model, f"get_{kind}_features")(**inputs, return_dict=True)
    return model.get_decoder()(**inputs, use_cache=False)


def load_model(source: str, pretrained: bool) -> Any:
    """Load a Hugging Face model, or build it from its configuration with random weights."""
    if not pretrained:
        return build_model(source, load_auto("AutoConfig", source))
    model, loading = load_auto("AutoModel", source, output_loading_info=True)
    missing = sorted(name for name in loading["missing_keys"] if "pooler." not in name)
    if missing and any("Model" in name for name in getattr(model.config, "auto_map", None) or {}):
        # The folder's code extends an architecture of transformers, which lacks the extension.
        raise FusionZooError(
            f"{source} {CUSTOM_CODE}: without it {len(missing)} weights are missing, such as"
            f" {missing[0]}"
        )
    return model.float()


def aligned(module: M) -> M:
    """Copy weights out of the checkpoint's mapped file, where their addresses are odd.

    The last bit of results depends on the alignment, so they would differ from those of the model
    that is stored and loaded again. Weights that transformers split while loading are views of one
    tensor, which a model folder cannot hold.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


def build_model(source: str, config: Any) -> Any:
    """Build a Hugging Face model with random weights; `source` names it in errors."""
    from transformers import AutoModel

    try:
        return AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _unusable(source, error) from error


def load_auto(loader: str, source: str, **options: Any) -> Any:
    """Load with one of transformers' Auto classes, from a local folder or the hub.

    `trust_remote_code` is always False: by default transformers asks on the terminal, and a "y" on
    standard input would run code from the folder.
    """
    torchaudio_or_none()  # if it cannot be imported, transformers shall not try
    import transformers

    load = getattr(transformers, loader).from_pretrained
    local = Path(source).is_dir()

    def read() -> Any:
        try:
            return load(source, local_files_only=local, trust_remote_code=False, **options)
        except Exception as error:
            if local or "custom code" in str(error):
                raise _unusable(source, error) from error
            raise  # `from_hub` explains errors of the hub

    return read() if local else from_hub(f"hf/{source}", read)


def load_tokenizer(source: str) -> Any:
    """Load a tokenizer; one without a vocabulary is an error.

    If a folder lacks the vocabulary, transformers returns a tokenizer with special tokens only,
    which turns every text into unknown tokens.
    """
    tokenizer = load_auto("AutoTokenizer", source)
    special = set(tokenizer.all_special_ids)
    vocabulary = tokenizer.get_vocab().items()
    if not any(number not in special and token.strip("▁Ġ ") for token, number in vocabulary):
        raise FusionZooError(
            f"{source} holds no tokenizer: save it there too (tokenizer.json, or the vocabulary"
            " files that the model was trained with)"
        )
    return tokenizer


def find_file(source: str, name: str) -> Path | None:
    """Return an optional file of a folder or of a model on the hub, None if it has none.

    Of a model that an earlier download left in the hub's cache, and with no hub in reach, it may
    be unknown whether there is such a file: that is logged.
    """
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    def read() -> str | None:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False)

    try:
        path = from_hub(f"hf/{source}", read)
    except FusionZooError:
        _log.warning(
            "%s: %s is not in the cache and the hub cannot be reached: it is taken to have none",
            *(source, name),
        )
        return None
    return None if path is None else Path(path)


def read_json(path: Path) -> Any:
    """Read a small JSON file of a model's folder."""
    with explained(f"{path} cannot be read as JSON", OSError, ValueError, RecursionError):
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; at most {MAX_JSON:,}")
        return json.loads(path.read_text(encoding="utf-8"))


def _unusable(source: str, error: Exception) -> FusionZooError:
    if "custom code" in str(error):
        return FusionZooError(f"{source} {CUSTOM_CODE}")
    cause = broken_torchaudio() if isinstance(error, ImportError) else ""
    return FusionZooError(f"{source} cannot be loaded: {cause or one_line(error)}")


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


def joint_models() -> dict[str, Any]:
    """Return the joint models that were read in this block of `shared_checkpoints`, by source."""
    models = _models.get()
    return {} if models is None else models


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


class AnyTower(nn.Module):
    """One tower of any joint model, run by transformers' own `get_*_features`.

    Parts of the model that these do not run are left out. Tokens are projected where they are as
    wide as the projection's input; where they keep another width, the pooled vector is the token.
    Those of a picture that its language model reads are as this reads them.

    Shapes: inputs of the tower -> tokens (B, T, D), pooled (B, D), None where the model has none
    """

    def __init__(self, model: Any, kind: str, projects: bool, sample: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kind, self.family, self.projects = kind, model.config.model_type, projects
        self.joint_config = model.config  # of all towers
        names = {"image": ("visual_projection", "image_projection")}.get(
            kind, (f"{kind}_projection",)
        )
        self.name = next((x for x in names if isinstance(getattr(model, x, None), nn.Linear)), "")
        self.model = _without_unused(model, kind, sample)
        if self.name and not projects:
            setattr(self.model, self.name, nn.Identity())

    def forward(self, rows: int | None = None, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        count: int = next(iter(inputs.values())).shape[0] if rows is None else rows
        output = run_part(self.model, self.kind, inputs)
        tokens, pooled = output.last_hidden_state, getattr(output, "pooler_output", None)
        if isinstance(pooled, list | tuple):  # one tensor for each picture, or one of all tokens
            if len({len(x) for x in pooled}) > 1:
                raise ValueError(f"pictures of one size have {[len(x) for x in pooled]} tokens")
            pooled = torch.cat([x.reshape(-1, x.shape[-1]) for x in pooled])
        if pooled is not None and (pooled.ndim != 2 or pooled.shape[0] != count):
            tokens, pooled = pooled.reshape(count, -1, pooled.shape[-1]), None
            # FLAVA projects all tokens, of which the first stands for the input
            return tokens, tokens[:, 0] if self.family == "flava" else None
        if tokens.ndim == 4:
            tokens = rearrange(tokens, "b d h w -> b (h w) d")
        if pooled is None:
            return tokens, None
        projection = getattr(self.model, self.name) if self.name else nn.Identity()
        if isinstance(projection, nn.Linear) and projection.in_features == tokens.shape[2]:
            tokens = projection(tokens)
        return (tokens if tokens.shape[2] == pooled.shape[1] else pooled[:, None]), pooled


@torch.no_grad()
def _without_unused(model: Any, kind: str, sample: Mapping[str, Tensor]) -> Any:
    """Return a copy of a joint model with the parts alone that encode one kind."""
    is_training = model.training
    with evaluating(model):
        run = called_modules(model, lambda: run_part(model, kind, sample))
    used = {name for name, part in model.named_modules() if run.intersection(part.modules())}
    tower = copy.copy(model)
    tower._modules = {name: part if name in used else None for name, part in model.named_children()}
    tower = copy.deepcopy(tower).eval()
    removed = [
        (part, child, inner)
        for name, part in tower.named_modules()
        for child, inner in part.named_children()
        if f"{name}.{child}".lstrip(".") not in used and any(True for _ in inner.parameters())
    ]
    try:
        for part, child, _ in removed:  # such as BLIP's attention to images
            setattr(part, child, None)
        run_part(tower, kind, sample)
    except (AttributeError, TypeError):  # the model asks for one of them
        for part, child, inner in removed:
            setattr(part, child, inner)
    parameters, tower._parameters = tower._parameters, {}  # scales of the logits
    try:
        run_part(tower, kind, sample)
    except AttributeError:  # what stands between the rows of a picture, in LLaVA-NeXT
        tower._parameters = parameters
    return tower.train(is_training)


def load_tower(
    source: str,
    kind: str,
    pretrained: bool,
    projects: bool = True,
    sample: Mapping[str, Tensor] | None = None,
) -> Tower | AnyTower:
    """Load one tower of a joint model, or build it from the configuration with random weights.

    `sample` holds inputs of one row, by which the parts of a type that is not one of `JOINT` are
    found.
    """
    config = load_auto("AutoConfig", source)
    check_tower(source, config, kind)
    part, family = PARTS[kind][0], config.model_type
    is_known = family in JOINT
    if not is_known and sample is None:
        raise FusionZooError(
            f"{source} is a model of several modalities ({family}): hf-clip/{source} takes the"
            " tower of one"
        )
    models = joint_models()
    if not pretrained:
        model = build_model(source, with_one_tower(config, kind))
    # A `Tower` leaves the model, so a second one of its kind, with its own weights, is read anew.
    elif source not in models or (is_known and getattr(models[source], part) is None):
        model = models[source] = load_model(source, True)
    else:
        model = models[source]
    if is_known:
        tower: Tower | AnyTower = Tower(model, kind, projects)
        if pretrained:
            setattr(model, part, None)
            return aligned(tower)
    else:
        with explained(f"{source}: the {kind} tower of a {family} cannot be run by itself"):
            tower = AnyTower(model, kind, projects, sample or {})
    tower.joint_config = copy.deepcopy(config)
    return tower


def check_tower(source: str, config: Any, kind: str) -> None:
    """Require a joint model with a tower for `kind`."""
    kinds = joint_kinds(config)
    if not kinds:
        raise FusionZooError(
            f"{source} is a {config.model_type}, not a joint model with a tower per modality"
            " (get_text_features and get_image_features or get_audio_features of transformers);"
            " hf/ takes models of one modality"
        )
    if kind not in kinds:
        raise FusionZooError(
            f"{source} is a {config.model_type}: it encodes {' and '.join(kinds)}, not {kind}"
        )


def with_one_tower(config: Any, kind: str) -> Any:
    """Return a joint model's configuration with the other towers, which are dropped, made small."""
    config = copy.deepcopy(config)
    for name, (_, _, part) in PARTS.items():
        other = getattr(config, part, None)
        if name == kind or other is None or name == "audio":  # CLAP's is small as it is
            continue
        other.num_hidden_layers = 1
        for layers in ("layer_types", "mlp_layer_types"):
            if getattr(other, layers, None):
                setattr(other, layers, getattr(other, layers)[:1])
        if name == "text":
            other.vocab_size = max(getattr(other, "pad_token_id", None) or 0, 0) + 1
    return config
