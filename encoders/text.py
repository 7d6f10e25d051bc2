"""Text encoders: any Hugging Face encoder, or bytes and a small transformer.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, masked_mean

from ._hugging_face import find_source, load_model, load_tokenizer
from ._transformer import TokenTransformer
from .base import ENCODERS, Encoder, Item, Processor

BYTES, START = 256, 256  # byte values, and the token before them


class TokenProcessor(Processor):
    """Pad token ids to the longest text of the batch."""

    pad_id: int

    def collate(self, items: Sequence[Item]) -> Item:
        ids = [item["input_ids"] for item in items]
        lengths = torch.tensor([len(one) for one in ids])
        padded = pad_sequence(ids, batch_first=True, padding_value=self.pad_id)
        return {
            "input_ids": padded,
            "attention_mask": torch.arange(padded.shape[1]) < lengths[:, None],
        }


class TokenizerProcessor(TokenProcessor):
    """Tokenise with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.pad_id = tokenizer.pad_token_id or 0

    def __call__(self, value: str, generator: torch.Generator | None = None) -> Item:
        ids = self.tokenizer(value, truncation=True, max_length=self.max_length)["input_ids"]
        return {"input_ids": torch.tensor(ids or [self.pad_id])}

    def blank(self) -> Item:
        return self("")


class BytesProcessor(TokenProcessor):
    """A start token, then UTF-8 bytes."""

    pad_id = 0

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def __call__(self, value: str, generator: torch.Generator | None = None) -> Item:
        return {"input_ids": torch.tensor([START, *value.encode()][: self.max_length])}

    def blank(self) -> Item:
        return self("")


@ENCODERS.register("hf-text", family="text", takes_model=True)
class HFText(Encoder):
    """Any Hugging Face `AutoModel` for text, by hub name or local folder; T5-like: the encoder
    half.

    `pooling`: the mean over real tokens (as sentence-transformers' MiniLM), or the first token
    (`cls`). Texts are cut to `max_length` tokens, or to what the model can take.

    Shapes: inputs["input_ids"] (B, T), inputs["attention_mask"] bool (B, T) -> Features of
        (B, T, D), (B, T), (B, D) with D = config.hidden_size
    """

    kind = "text"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        pooling: Literal["mean", "cls"] = "mean",
        max_length: int = 128,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the loader forks
        if pooling not in ("mean", "cls"):
            raise FusionZooError(f"pooling={pooling!r} is neither 'mean' nor 'cls'")
        self.pooling = pooling
        source = find_source(model, assets)
        self.net = load_model(source, pretrained)
        self.tokenizer: Any = load_tokenizer(source)
        if self.net.config.is_encoder_decoder:
            self.net = self.net.get_encoder()
        self.dim = self.net.config.hidden_size
        room = getattr(self.net.config, "max_position_embeddings", None) or max_length
        # RoBERTa counts positions from its padding id on.
        offset = 2 if "roberta" in self.net.config.model_type else 0
        self.max_length = min(max_length, room - offset)

    def processor(self, train: bool) -> Processor:
        return TokenizerProcessor(self.tokenizer, self.max_length)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        mask = inputs["attention_mask"]
        tokens = self.net(input_ids=inputs["input_ids"], attention_mask=mask.long())[0]
        pooled = tokens[:, 0] if self.pooling == "cls" else masked_mean(tokens, mask)
        return Features(tokens, mask, pooled)

    def save_assets(self, folder: Path) -> None:
        self.net.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@ENCODERS.register("chars", family="text")
class Chars(Encoder):
    """A small transformer on UTF-8 bytes, trained from scratch: no vocabulary, no download.

    Shapes: inputs["input_ids"] (B, T), inputs["attention_mask"] bool (B, T) -> Features of
        (B, T, dim), (B, T), (B, dim); token 0 stands for the start, so an empty text has one token
    """

    kind = "text"

    def __init__(
        self,
        *,
        dim: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
        max_length: int = 256,
    ) -> None:
        super().__init__()
        self.dim, self.max_length = dim, max_length
        self.embed = nn.Embedding(BYTES + 1, dim)
        self.transformer = TokenTransformer(dim, num_layers, num_heads, dropout, max_length)

    def processor(self, train: bool) -> Processor:
        return BytesProcessor(self.max_length)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return self.transformer(self.embed(inputs["input_ids"]), inputs["attention_mask"])
