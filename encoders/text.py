"""Text encoders: any Hugging Face encoder, or a small transformer on bytes.

Shapes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fusionzoo.errors import FusionZooError, check_choice, one_line
from fusionzoo.structures import Features, evaluating

from .base import ENCODERS, Encoder, Item, Processor, TokenTransformer, run_by_length
from .hf import (
    aligned,
    find_source,
    join_source,
    load_model,
    load_tokenizer,
    read_json,
    refuse_joint,
)
from .sentence import MODES, SentenceHead, pool, read_sentence_config

BYTES, START = 256, 256  # number of byte values, and the token that starts a text
LENGTHS = (1, 4, 16, 64)  # tokens that a model is tried with, until it encodes a text
MEASURED = "measured.json"  # in a model folder: what running the net told when it was built
PADDED = 1e-3  # of the largest value: what padding may change before rows are run by length


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

    takes_batches = True

    def __init__(
        self, tokenizer: Any, max_length: int, prompt: str = "", lower_case: bool = False
    ) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.prompt, self.lower_case = prompt, lower_case
        self.pad_id = tokenizer.pad_token_id or 0

    def __call__(self, value: str, generator: torch.Generator | None = None) -> Item:
        return self._tokenise([value])[0]

    def batch_items(
        self, values: Sequence[str | list[str]], generators: Sequence[torch.Generator | None]
    ) -> list[list[Item]]:
        texts = [value if isinstance(value, list) else [value] for value in values]
        items = iter(self._tokenise([text for several in texts for text in several]))
        return [[next(items) for _ in several] for several in texts]

    def cuts(self, value: str) -> bool:
        ids = self.tokenizer(self.prompt + value, verbose=False)["input_ids"]
        return len(ids) > self.max_length

    def _tokenise(self, values: Sequence[str]) -> list[Item]:
        """Tokenise texts in one call, which takes half as long as a call for each."""
        texts = [self.prompt + value for value in values]
        texts = [text.lower() for text in texts] if self.lower_case else texts
        rows = self.tokenizer(
            texts, truncation=True, max_length=self.max_length, return_attention_mask=False
        )["input_ids"]
        return [{"input_ids": torch.tensor(ids or [self.pad_id])} for ids in rows]

    def blank(self) -> Item:
        return self("")


class BytesProcessor(TokenProcessor):
    """Turn text into a start token and its UTF-8 bytes; longer texts are cut."""

    pad_id = 0

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def __call__(self, value: str, generator: torch.Generator | None = None) -> Item:
        return {"input_ids": torch.tensor([START, *value.encode()][: self.max_length])}

    def cuts(self, value: str) -> bool:
        return len(value.encode()) >= self.max_length  # behind the start

    def blank(self) -> Item:
        return self("")


@ENCODERS.register("hf-text", family="text", takes_model=True)
class HFText(Encoder):
    """Encode text with any Hugging Face `AutoModel`, by hub name or local folder.

    Of an encoder-decoder such as T5 only the encoder is used. A model that sentence-transformers
    saved (with `modules.json`) is pooled as its files say, dense layers and normalisation included.

    Settings:
        pretrained: load the model's weights; otherwise its configuration with random weights
        pooling: `mean`, `max`, `mean_sqrt_len` or `weighted_mean` of the real tokens, the first
            (`cls`) or the `last`; `auto` is that of a sentence-transformers model, else `mean`
        max_length: tokens kept of a text, at most as many as the model can take; unless set, those
            of a sentence-transformers model, else 128
        assets: folder that `save_assets` wrote; set when a saved model is loaded

    Shapes: inputs["input_ids"] (B, T), inputs["attention_mask"] bool (B, T) -> Features of
        (B, T, D), (B, T), (B, D) with D measured, or that of the last dense layer
    """

    kind = "text"
    cut_by = "max_length"

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        pooling: Literal[
            "auto", "mean", "cls", "max", "last", "mean_sqrt_len", "weighted_mean"
        ] = "auto",
        max_length: int | None = None,
        assets: Path | None = None,
    ) -> None:
        super().__init__()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data loader forks
        check_choice("pooling", pooling, ("auto", *MODES))
        source = find_source(model, assets)
        if not Path(source).is_dir():
            refuse_joint(source, model)  # also whether the hub has the model at all
        sentence = read_sentence_config(source) if pooling == "auto" else None
        inner = source if sentence is None else join_source(source, sentence.transformer)
        refuse_joint(inner, model)
        self.net = load_model(inner, pretrained)
        self.tokenizer: Any = load_tokenizer(inner)
        self.config = self.net.config  # of the whole model: AutoModel may know no other
        if self.config.is_encoder_decoder:
            self.net = self.net.get_encoder()
        aligned(self.net)
        # A decoder keeps keys and values for texts that it goes on with; no text is gone on with.
        takes = inspect.signature(self.net.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in takes else {}
        self.pooling = "mean" if pooling == "auto" else pooling
        self.head: SentenceHead | None = None
        self.prompt, self.lower_case = "", False
        if sentence is not None:
            self.prompt, self.lower_case = sentence.prompt, sentence.lower_case
            max_length = max_length or sentence.max_length
        self.max_length = self._length(max_length, sentence is not None)
        measured = None if assets is None else read_json(assets / MEASURED)
        if isinstance(measured, dict) and measured.keys() == {"width", "fewest", "one_length"}:
            self.width, self.fewest = int(measured["width"]), int(measured["fewest"])
            self.one_length = bool(measured["one_length"])
        else:
            self.width = self._measure(model)
            self.one_length = self._reads_padding()
        self.dim = self.width
        if sentence is not None:
            self.head = SentenceHead(sentence, source, self.dim, pretrained)
            self.dim, self.checkpoint_settings = self.head.dim, sentence.facts

    def _length(self, max_length: int | None, is_sentence: bool) -> int:
        """Return how many tokens are kept of a text."""
        config = getattr(self.net, "config", self.config)  # FSMT's encoder has none
        if max_length is None and is_sentence:
            max_length = min(512, int(self.tokenizer.model_max_length))
        max_length = max_length or 128
        positions = getattr(config, "max_position_embeddings", None) or max_length
        # RoBERTa's positions start after its padding id.
        offset = 2 if "roberta" in config.model_type else 0
        # XLNet says -1, for any number.
        return min(max_length, positions - offset) if positions > 0 else max_length

    def _measure(self, model: str) -> int:
        """Run an empty text; return the tokens' width. Set the fewest tokens that the net takes."""
        prepare, problem = self.processor(False), None
        ids, mask = prepare.collate([prepare.blank()]).values()
        for self.fewest in LENGTHS:
            try:
                with evaluating(self), torch.no_grad():
                    tokens = self._run(ids, mask)
                if tokens.shape[:-1] != ids.shape:
                    raise ValueError(f"{ids.shape[1]} tokens give {tuple(tokens.shape)}")
            except Exception as error:
                problem = problem or error
            else:
                return tokens.shape[-1]
        assert problem is not None
        raise FusionZooError(
            f"hf/{model}: a {type(self.net).__name__} does not encode a text alone:"
            f" {one_line(problem) or type(problem).__name__}"
        ) from problem

    @torch.no_grad()
    def _reads_padding(self) -> bool:
        """Whether a text's tokens depend on the padding behind them, as FNet's do."""
        prepare = self.processor(False)
        items = [prepare("a"), prepare("a b c d e f g h")]
        ids, mask = prepare.collate(items).values()
        length = len(items[0]["input_ids"])
        with evaluating(self):
            padded = self._run(ids, mask)[0, :length]
            alone = self._run(ids[:1, :length], mask[:1, :length])[0]
        return bool((padded - alone).abs().max() > PADDED * alone.abs().max())

    def processor(self, train: bool) -> Processor:
        return TokenizerProcessor(self.tokenizer, self.max_length, self.prompt, self.lower_case)

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self.one_length:
            tokens, mask = run_by_length(mask.sum(1), self._run, ids, mask)
        else:
            tokens = self._run(ids, mask)
        if self.head is None:
            return Features(tokens, mask, pool(tokens, mask, self.pooling))
        tokens, pooled = self.head(tokens, mask)
        return Features(tokens, mask, pooled)

    def _run(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens, (B, T) -> (B, T, D); CANINE, for one, takes no fewer than 4."""
        missing = max(0, self.fewest - ids.shape[1]) if self.fewest > 1 else 0
        if missing:
            ids = F.pad(ids, (0, missing), value=self.tokenizer.pad_token_id or 0)
            mask = F.pad(mask, (0, missing))
        try:
            tokens: Tensor = self.net(input_ids=ids, attention_mask=mask.long(), **self.options)[0]
        except ValueError as error:
            if not self.training:
                raise
            raise FusionZooError(  # such as Reformer, which trains on texts of one length alone
                f"a {type(self.net).__name__} encodes texts, but cannot be trained on them"
                f" ({one_line(error)}): freeze=all uses it as it is"
            ) from error
        return tokens[:, : tokens.shape[1] - missing] if missing else tokens

    def save_assets(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        measured = {"width": self.width, "fewest": self.fewest, "one_length": self.one_length}
        (folder / MEASURED).write_text(json.dumps(measured) + "\n", encoding="utf-8")
        if self.head is not None:
            self.head.save(folder)


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
    cut_by = "max_length"

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
