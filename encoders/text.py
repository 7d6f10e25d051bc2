"""Text encoders: any Hugging Face encoder, or a small transformer on bytes.

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

BYTES, START = 256, 256  # number of byte values, and the token that starts a text


class TokenProcessor(Processor):
    """Pad token ids to the longest text of the batch."""

    pad_id: int

    def varies(self, value: str) -> bool:
        return False

    def collate(self, items: Sequence[Item]) -> Item:
        ids = [item["input_ids"] for item in items]
        lengths = torch.tensor([len(tokens) for tokens in ids])
        padded = pad_sequence(ids, batch_first=True, padding_value=self.pad_id)
        return {
            "input_ids": padded,
            "attention_mask": torch.arange(padded.shape[1]) < lengths[:, None],
        }


class TokenizerProcessor(TokenProcessor):
    """Tokenise with a Hugging Face tokenizer; longer texts are cut."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.pad_id = tokenizer.pad_token_id or 0

    def __call__(self, value: str, generator: torch.Generator | None = None) -> Item:
        ids = self.tokenizer(value, truncation=True, max_length=self.max_length)["input_ids"]
        return {"input_ids": torch.tensor(ids or [self.pad_id])}

    def blank(self) -> Item:
        return self("")


class BytesProcessor(TokenProcessor):
    """Turn text into a start token and its UTF-8 bytes; longer texts are cut."""

    pad_id = 0

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def __call__(self, value: str, generator: torch.Generator | None = None) -> Item:
        return {"input_ids": torch.tensor([START, *value.encode()][: self.max_length])}

    def blank(self) -> Item:
        return self("")


@ENCODERS.register("hf-text", family="text", takes_model=True)
class HFText(Encoder):
    """Encode text with any Hugging Face `AutoModel`, by hub name or local folder.

    Of an encoder-decoder such as T5 only the encoder is used.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        pooling: `mean` over the real tokens (as sentence-transformers' MiniLM), or the first token
            (`cls`)
        max_length: tokens kept of a text, at most as many as the model can take
        assets: folder that `save_assets` wrote; set when a saved model is loaded

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
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data loader forks
        if pooling not in ("mean", "cls"):
            raise FusionZooError(f"pooling={pooling!r} is neither 'mean' nor 'cls'")
        self.pooling = pooling
        source = find_source(model, assets)
        self.net = load_model(source, pretrained)
        self.tokenizer: Any = load_tokenizer(source)
        if self.net.config.is_encoder_decoder:
            self.net = self.net.get_encoder()
        self.dim = self.net.config.hidden_size
        positions = getattr(self.net.config, "max_position_embeddings", None) or max_length
        # RoBERTa's positions start after its padding id.
        offset = 2 if "roberta" in self.net.config.model_type else 0
        self.max_length = min(max_length, positions - offset)

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
    """Encode UTF-8 bytes with a small transformer, trained from scratch.

    It needs no vocabulary and no download. A start token comes first, so even an empty text has a
    token.

    Settings:
        dim: width of tokens and pooled vector, divisible by `num_heads`
        num_layers: transformer layers
        num_heads: attention heads
        dropout: in attention and feed-forward layers, 0 to 1
        max_length: bytes kept of a text, plus one for the start token

    Shapes: inputs["input_ids"] (B, T), inputs["attention_mask"] bool (B, T) -> Features of
        (B, T, dim), (B, T), (B, dim)
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
