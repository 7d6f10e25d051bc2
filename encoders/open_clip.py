"""Encoders of images and texts by the towers of a model of open_clip: LAION's CLIP, CoCa, ...

Two modalities that name one model, `open_clip/<name or folder>`, get its two towers, read from
disk once, and their pooled vectors lie in one space.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean, explained
from fusionzoo.structures import Features

from .base import ENCODERS, Encoder, Item, unmasked
from .hf import joint_models, load_auto, load_tokenizer, read_json
from .image import FIT, ImageEncoder, Preparation, in_timm, timm_tokens
from .text import TokenizerProcessor
from .weights import from_hub, resolve

CONFIG = "open_clip_config.json"  # model_cfg and preprocess_cfg, as open_clip saves a model
HUB = "hf-hub:"  # before <owner>/<model>
PARTS = {"image": "visual", "text": "text"}  # how open_clip calls the towers
RESIZE_MODES = {"shortest": "crop", "squash": "squash"}  # open_clip's word -> ours
# The tower that is not wanted is built as small as it can be, and dropped.
PATCH = {"image_size": 8, "patch_size": 8, "width": 8, "head_width": 8, "layers": 1}
WORD = {"context_length": 2, "vocab_size": 2, "width": 8, "heads": 1, "layers": 1}
# Settings of a tokenizer that a configuration may hold. Not `trust_remote_code`, which would run
# code, nor `reduction_mask`, which drops words at random: long texts are cut instead.
TOKENIZER_SETTINGS = ("clean", "strip_sep_token", "language", "additional_special_tokens")
CANNOT_ENCODE = "cannot encode what it prepares"
_log = logging.getLogger("fusionzoo")


def library() -> Any:
    """Import open_clip."""
    with explained("open_clip/* needs pip install 'fusionzoo[open-clip]'", ImportError):
        return import_module("open_clip")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is known of a model of open_clip before its weights are read."""

    name: str  # what follows `open_clip/`
    source: str  # as open_clip takes it: a name, `hf-hub:..` or `local-dir:..`
    tag: str | None = None  # of the weights of a name
    folder: Path | None = None  # where it lies, unless open_clip or the hub has it
    model: Mapping[str, Any]  # model_cfg
    preprocessing: Mapping[str, Any]  # preprocess_cfg

    def tower(self, kind: str) -> dict[str, Any]:
        """Return the settings of a tower, which loads no weights of its own."""
        if kind == "image":
            return {**self.model["vision_cfg"], "timm_model_pretrained": False}
        settings = {**self.model["text_cfg"], "hf_model_pretrained": False}
        if self.hf_text:
            settings["hf_model_name"] = self.hf_text
        return settings

    @property
    def hf_text(self) -> str:
        """The folder or name on the hub of a text tower of transformers, if it is one."""
        name = self.model["text_cfg"].get("hf_model_name")
        if name and self.folder is not None and (self.folder / "config.json").is_file():
            return str(self.folder)
        return str(name or "")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        about = {"model_cfg": self.model, "preprocess_cfg": self.preprocessing}
        (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n", "utf-8")


def find_checkpoint(
    model: str, tag: str | None, assets: Path | None, *, pretrained: bool
) -> Checkpoint:
    """Read the configuration of a model: of a saved one, of a name, of the hub or of a folder."""
    names = library().list_models()
    if assets is None and model in names:
        return _listed(model, tag, pretrained)
    if assets is None and tag is not None:
        raise FusionZooError(
            f"open_clip/{model}: tag={tag!r} chooses among the weights of a name that open_clip"
            " lists, and this is none"
        )
    if assets is None and model.startswith(HUB):
        from huggingface_hub import hf_hub_download

        def download() -> str:
            return hf_hub_download(model.removeprefix(HUB), CONFIG)

        path = Path(from_hub(f"open_clip/{model}", download))
        return Checkpoint(name=model, source=model, **_read_config(path))
    folder = assets or resolve(model)
    if assets is None and not folder.is_dir():
        near = did_you_mean(model, names)
        raise FusionZooError(
            f"open_clip has no model {model!r}, and there is no such folder.{near}"
            f" open_clip.list_models() lists them; open_clip/{HUB}<owner>/<model> asks the hub"
        )
    if not (folder / CONFIG).is_file():
        why = "which open_clip writes" if assets is None else "the model folder is not complete"
        raise FusionZooError(f"{folder / CONFIG} is missing: {why}")
    return Checkpoint(
        name=model, source=f"local-dir:{folder}", folder=folder, **_read_config(folder / CONFIG)
    )


def _listed(model: str, tag: str | None, pretrained: bool) -> Checkpoint:
    """Return the model of a name, and what is known of the weights of this tag."""
    open_clip = library()
    tags = open_clip.list_pretrained_tags_by_model(model)
    about = open_clip.get_pretrained_cfg(model, tag) if tag else {}
    if (pretrained or tag) and not about:
        fault = "needs tag=, the name of its weights" if tag is None else f"has no tag {tag!r}"
        raise FusionZooError(
            f"open_clip/{model} {fault}.{did_you_mean(tag or '', tags)} There are:"
            f" {', '.join(tags) or 'none'}; pretrained=false trains from scratch"
        )
    config = open_clip.get_model_config(model)
    quick = [bool(x.get("quick_gelu", False)) for x in (about, config)]
    if about and quick[0] != quick[1]:
        other = f"{model}-quickgelu" if quick[0] else model.removesuffix("-quickgelu")
        raise FusionZooError(
            f"open_clip/{model}: the weights {tag!r} were trained with another activation: name"
            f" open_clip/{other}"
        )
    return Checkpoint(
        name=model, source=model, tag=tag, model=config, preprocessing=_preprocessing(about)
    )


def _read_config(path: Path) -> dict[str, Any]:
    about = read_json(path)
    config = about.get("model_cfg") if isinstance(about, dict) else None
    parts = ("vision_cfg", "text_cfg")
    if not isinstance(config, dict) or not all(isinstance(config.get(x), dict) for x in parts):
        raise FusionZooError(f"{path} has no model_cfg with {' and '.join(parts)}")
    return {"model": config, "preprocessing": _preprocessing(about.get("preprocess_cfg") or {})}


def _preprocessing(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return open_clip's defaults with what a configuration says instead."""
    transform = import_module("open_clip.transform")
    settings: dict[str, Any] = transform.merge_preprocess_dict(transform.PreprocessCfg(), about)
    return settings


def load_tower(checkpoint: Checkpoint, kind: str, pretrained: bool) -> Any:
    """Load one tower of a model, or build it with random weights; it returns its tokens too."""
    if (pretrained or kind == "text") and checkpoint.hf_text:
        load_auto("AutoConfig", checkpoint.hf_text)  # refuses what needs code of its own
    trunk = checkpoint.model["vision_cfg"].get("timm_model_name")
    if trunk and not in_timm(str(trunk)):
        raise FusionZooError(f"open_clip/{checkpoint.name}: timm has no model {trunk!r}")
    if not pretrained:
        tower = _read(checkpoint, lambda: _build(checkpoint, kind))
    else:
        models, part = joint_models(), PARTS[kind]
        key = f"{checkpoint.source} {checkpoint.tag}"
        # A tower leaves the model, so a second one of its kind is read anew.
        if getattr(models.get(key), part, None) is None:
            models[key] = _read(checkpoint, lambda: _load(checkpoint))
        tower = getattr(models[key], part)
        setattr(models[key], part, None)
    if hasattr(tower, "output_tokens"):
        tower.output_tokens = True
    return tower


def _build(checkpoint: Checkpoint, kind: str) -> Any:
    config = checkpoint.model
    model = library().CustomTextCLIP(
        config["embed_dim"],
        vision_cfg=checkpoint.tower("image") if kind == "image" else PATCH,
        text_cfg=checkpoint.tower("text") if kind == "text" else WORD,
        quick_gelu=config.get("quick_gelu", False),
    )
    return getattr(model, PARTS[kind])


def _load(checkpoint: Checkpoint) -> Any:
    """Read all weights of a model; both towers are modules of their own."""
    with _quiet():
        return library().create_model(
            checkpoint.source,
            pretrained=checkpoint.tag,
            force_custom_text=True,
            pretrained_text=False,
            require_pretrained=True,
            text_cfg=checkpoint.tower("text"),
        )


def _read(checkpoint: Checkpoint, action: Callable[[], Any]) -> Any:
    """Run what may read files of the model; a folder asks no hub but for a tower's own parts."""
    if checkpoint.folder is None and (checkpoint.tag or checkpoint.source.startswith(HUB)):
        return from_hub(f"open_clip/{checkpoint.name}", action)
    with explained(f"open_clip/{checkpoint.name} cannot be loaded"):
        return action()


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what open_clip logs, by the root logger, whose set-up it would change."""
    root, handler = logging.getLogger(), logging.NullHandler()

    def drop(_: logging.LogRecord) -> bool:
        return False

    root.addHandler(handler)
    root.addFilter(drop)
    try:
        yield
    finally:
        root.removeFilter(drop)
        root.removeHandler(handler)


def run_tower(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens (B, T, D), on the path of the pooled vector, and that vector (B, D).

    Where a tower gives no tokens, as a ResNet, the pooled vector is its one token.
    """
    if hasattr(net, "trunk"):
        return _run_timm(net, x)
    output = net(x)
    if not isinstance(output, tuple):
        return output[:, None], output
    pooled, tokens = output
    if getattr(net, "final_ln_after_pool", False) and net.attn_pool is None:
        tokens = net.ln_post(tokens)
    if getattr(net, "cls_emb", None) is not None:
        tokens = net.ln_final(tokens)
    projection = getattr(net, "proj", getattr(net, "text_projection", None))
    if isinstance(projection, nn.Module):
        tokens = projection(tokens)
    elif projection is not None:
        tokens = tokens @ projection
    return tokens, pooled


def _run_timm(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run a tower of timm; its tokens are cells or patches, if its head takes them one by one."""
    feature_map = net.trunk.forward_features(x)
    pooled = net.head(net.trunk.forward_head(feature_map))
    tokens = timm_tokens(net.trunk, feature_map)
    head = net.head if len(net.head) else net.trunk.get_classifier()
    if hasattr(head, "pool") or not isinstance(head, nn.Module):
        return pooled[:, None], pooled
    linear = next((part for part in head.modules() if isinstance(part, nn.Linear)), None)
    takes = pooled.shape[-1] if linear is None else linear.in_features
    return (head(tokens) if tokens.shape[-1] == takes else pooled[:, None]), pooled


@ENCODERS.register("open_clip-image", family="image", takes_model=True)
class OpenClipImage(ImageEncoder):
    """Encode images with the image tower of a model of open_clip, prepared as it says.

    The pooled vector is that of open_clip's `encode_image`; tokens are projected too. Of a text
    tower of the same model only the space is shared, no weights.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        tag: which weights of a name, such as `laion2b_s34b_b79k`; a folder or a model of the hub
            has one set of weights
        fit: instead of the model's, `crop` the centre after resizing the shorter side, `pad` to a
            square with white, or `squash` to a square
        augment: in training only, a random `crop` of 60 to 100 % of the area; `crop_flip` also
            mirrors half of the images
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["pixels"] uint8 (B, 3, H, W) -> (B, T, D), (B, T), (B, D) with T patches, or 1,
        and D = embed_dim
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        tag: str | None = None,
        fit: Literal["crop", "pad", "squash"] | None = None,
        augment: Literal["none", "crop", "crop_flip"] = "none",
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint = find_checkpoint(model, tag, assets, pretrained=pretrained)
        self.net = load_tower(self.checkpoint, "image", pretrained)
        about, size = self.checkpoint.preprocessing, self.net.image_size
        mode = about["resize_mode"]
        if fit is None and mode not in RESIZE_MODES:
            raise FusionZooError(
                f"open_clip/{model}: it prepares images by resize_mode {mode!r}, which is not"
                f" supported; fit= sets another way: {', '.join(FIT)}"
            )
        mean, std = (
            (x,) * 3 if isinstance(x, int | float) else tuple(x)
            for x in (about["mean"], about["std"])
        )
        preparation = Preparation(
            size=(size, size) if isinstance(size, int) else tuple(size),
            mean=mean,
            std=std,
            interpolation="bilinear" if about["interpolation"] == "bilinear" else "bicubic",
            fit=fit or RESIZE_MODES[mode],
        )
        self.set_processing(preparation, augment)
        self.checkpoint_settings = asdict(preparation)
        with explained(f"open_clip/{model} {CANNOT_ENCODE}"):
            self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        tokens, pooled = run_tower(self.net, self.normalise(inputs["pixels"]))
        return unmasked(tokens, pooled)

    def save_assets(self, folder: Path) -> None:
        self.checkpoint.save(folder)


class OpenClipTokens(TokenizerProcessor):
    """Tokenise with open_clip's tokenizer; what pads a text to the full length is cut off."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        inner = getattr(tokenizer, "tokenizer", None)  # of transformers
        self.pad_id = int(getattr(inner, "pad_token_id", None) or 0)

    def _tokenise(self, values: Sequence[str]) -> list[Item]:
        if not values:
            return []
        rows = self.tokenizer(list(values))
        places = torch.arange(1, rows.shape[1] + 1)
        lengths = (places * (rows != self.pad_id)).amax(1).clamp(min=1).tolist()
        return [{"input_ids": row[:n].clone()} for row, n in zip(rows, lengths, strict=True)]


def load_open_clip_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the model's own tokenizer: open_clip's, or one of transformers, of the same folder."""
    settings = checkpoint.model["text_cfg"]
    chosen = settings.get("tokenizer_kwargs") or {}
    options = {name: chosen[name] for name in TOKENIZER_SETTINGS if name in chosen}
    ignored = sorted(chosen.keys() - options.keys())
    if ignored:
        _log.warning("open_clip/%s: tokenizer_kwargs %s are ignored", checkpoint.name, ignored)
    options["context_length"] = settings.get("context_length", 77)
    module = import_module("open_clip.tokenizer")
    name = settings.get("hf_tokenizer_name")
    if not name:
        return module.SimpleTokenizer(**options)
    source = str(checkpoint.folder or name)
    load_tokenizer(source)  # refuses code, and a folder without a vocabulary
    mode = settings.get("tokenizer_mode")
    return module.HFTokenizer(source, tokenizer_mode=mode, **options)


@ENCODERS.register("open_clip-text", family="text", takes_model=True)
class OpenClipText(Encoder):
    """Encode text with the text tower of a model of open_clip, and its own tokenizer.

    The pooled vector is that of open_clip's `encode_text`; tokens are projected too.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        tag: which weights of a name, such as `laion2b_s34b_b79k`; a folder or a model of the hub
            has one set of weights
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["input_ids"] (B, T), inputs["attention_mask"] bool (B, T) -> Features of
        (B, T, D), (B, T), (B, D) with D = embed_dim
    """

    kind = "text"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        tag: str | None = None,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint = find_checkpoint(model, tag, assets, pretrained=pretrained)
        self.net = load_tower(self.checkpoint, "text", pretrained)
        self.tokenizer = load_open_clip_tokenizer(self.checkpoint)
        self.pad_id = OpenClipTokens(self.tokenizer).pad_id
        with explained(f"open_clip/{model} {CANNOT_ENCODE}"):
            self.measure()

    def processor(self, train: bool) -> OpenClipTokens:
        return OpenClipTokens(self.tokenizer)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        length = self.tokenizer.context_length  # the tower takes no other
        padding = ids.new_full((ids.shape[0], length), self.pad_id)
        full = torch.cat([ids.masked_fill(~mask, self.pad_id), padding], dim=1)[:, :length]
        tokens, pooled = run_tower(self.net, full)
        if tokens.shape[1] < length:  # the class token, whose vector is the pooled one
            tokens = torch.cat([pooled[:, None], tokens], dim=1)
        # Not a slice, which torch.export would trace for texts shorter than the full length alone.
        places = torch.arange(ids.shape[1], device=ids.device)
        return Features(tokens.index_select(1, places), mask, pooled)

    def save_assets(self, folder: Path) -> None:
        self.checkpoint.save(folder)
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(folder)
        if self.checkpoint.hf_text:
            self.net.config.save_pretrained(folder)
