"""Loading through transformers, without ever running code from a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, one_line

from .weights import from_hub, resolve


def find_source(model: str, assets: Path | None) -> str:
    """Return the folder that `assets` or the model's name refer to, else its name on the hub.

    A model folder without these assets is an error: loading it must not ask a hub.
    """
    if assets is not None and not assets.is_dir():
        raise FusionZooError(f"{assets} is missing: the model folder is not complete")
    folder = assets or resolve(model)
    return str(folder) if folder.exists() else model


def load_model(source: str, pretrained: bool) -> Any:
    """Load a Hugging Face model, or build it from its configuration with random weights."""
    from transformers import AutoModel

    if pretrained:
        return load_auto("AutoModel", source).float()
    config = load_auto("AutoConfig", source)
    try:
        return AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _unusable(source, error) from error


def load_auto(loader: str, source: str) -> Any:
    """Load with one of transformers' Auto classes, from a local folder or the hub.

    `trust_remote_code` is always False: by default transformers asks on the terminal, and a "y" on
    standard input would run code from the folder.
    """
    import transformers

    load = getattr(transformers, loader).from_pretrained
    local = Path(source).is_dir()

    def read() -> Any:
        try:
            return load(source, local_files_only=local, trust_remote_code=False)
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


def _unusable(source: str, error: Exception) -> FusionZooError:
    if "custom code" in str(error):
        return FusionZooError(
            f"{source} needs custom code of its own, which is never run: take a model"
            " whose architecture is part of transformers"
        )
    return FusionZooError(f"{source} cannot be loaded: {one_line(error)}")
