"""Loading through transformers, without ever running code from a model's folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fusionzoo.errors import FusionZooError, one_line

from ._torchaudio import torchaudio_or_none
from .weights import from_hub, resolve

M = TypeVar("M", bound=nn.Module)
JOINT = ("clip", "metaclip_2", "siglip", "clap")  # types of models with a tower per modality
MAX_JSON = 1 << 20  # bytes
CUSTOM_CODE = (
    "needs custom code of its own, which is never run: take a model whose architecture is part of"
    " transformers"
)
_log = logging.getLogger("fusionzoo")


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
    if hasattr(config, "text_config") and (
        hasattr(config, "vision_config") or hasattr(config, "audio_config")
    ):
        way_out = f": hf-clip/{model} takes the tower of one" if config.model_type in JOINT else ""
        raise FusionZooError(
            f"hf/{model} is a model of several modalities ({config.model_type}){way_out}"
        )


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
    that is stored and loaded again.
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
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; at most {MAX_JSON:,}")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FusionZooError(f"{path} cannot be read as JSON: {one_line(error)}") from None


def _unusable(source: str, error: Exception) -> FusionZooError:
    if "custom code" in str(error):
        return FusionZooError(f"{source} {CUSTOM_CODE}")
    return FusionZooError(f"{source} cannot be loaded: {one_line(error)}")
