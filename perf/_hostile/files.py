"""Whole files of every format, and mutations of them."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from PIL import Image

import fusionzoo

Original = dict[str, bytes]  # name -> contents
MEDIA = {
    **dict.fromkeys(("png", "jpg", "gif", "bmp", "tiff", "webp", "svg"), "image"),
    **dict.fromkeys(("wav", "flac", "ogg", "mp3"), "audio"),
    **dict.fromkeys(("npy",), "vector"),
    **dict.fromkeys(("npz",), "vector"),
}
TABLES = ("csv", "csv.gz", "jsonl", "parquet", "xlsx")
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer", "digests.json")
FORMATS = (*MEDIA, *TABLES, "yaml", *MODEL_FILES)
ONLY_BY_HAND = ("txt", "ods", "xls", "xlsb", "tar", "pickle", "cache", "resume", "evaluation")

RECIPE = """\
data: {name: digits}
fusion: &f
  name: mbt
  dim: 32
optim: {lr: 1e-3, settings: {betas: [0.9, 0.99]}}
train:
  epochs: 3
  batch_size: 16
encoders:
  text: chars
"""
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10"><defs><pattern id="p" width="4"
height="4" patternUnits="userSpaceOnUse"><rect width="2" height="2" fill="#c81e28"/></pattern>
</defs><rect width="9" height="9" fill="url(#p)"/><path d="M1 1 L9 9 C 2 3 4 5 6 7 Z"/></svg>
"""


def originals() -> dict[str, list[bytes]]:
    """Return whole files by format; model folders are made by `model_folder`."""
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 255, (12, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((48, 36))
    wave = 0.2 * draw.standard_normal((3000, 2))
    files: dict[str, list[bytes]] = {"svg": [SVG.encode()], "yaml": [RECIPE.encode()]}
    modes = {"png": ("RGB", "RGBA", "P", "I;16", "1"), "jpg": ("RGB", "L", "CMYK")}
    for suffix in ("png", "jpg", "gif", "bmp", "tiff", "webp"):
        pictures = [picture.convert(mode) for mode in modes.get(suffix, ("RGB", "L"))]
        files[suffix] = [_picture(x, suffix) for x in pictures]
    for suffix, (kind, subtypes) in {
        "wav": ("WAV", ("PCM_16", "FLOAT", "PCM_U8")),
        "flac": ("FLAC", ("PCM_16", "PCM_24")),
        "ogg": ("OGG", ("VORBIS", "OPUS")),
        "mp3": ("MP3", ("MPEG_LAYER_III",)),
    }.items():
        rate = 24_000 if kind == "OGG" else 22_050
        for subtype in subtypes:
            contents = io.BytesIO()
            soundfile.write(contents, wave, rate, format=kind, subtype=subtype)
            files.setdefault(suffix, []).append(contents.getvalue())
    files["npy"] = [_stored(np.save, draw.standard_normal(9).astype(x)) for x in ("<f4", "<i2")]
    files["npz"] = [_stored(np.savez_compressed, draw.standard_normal(9))]
    rows = [
        {"id": f"s{i}", "split": "train" if i % 3 else "test", "target": "ab"[i % 2]}
        | {"text": f"text {i}, with ünicode", "vector": [0.5 * i, 1.0]}
        for i in range(12)
    ]
    table = pa.Table.from_pylist(rows)
    lines = [",".join(f'"{row[k]}"' for k in ("id", "split", "target", "text")) for row in rows]
    files["csv"] = ["\n".join(["id,split,target,text", *lines, ""]).encode()]
    files["csv.gz"] = [gzip.compress(files["csv"][0], mtime=0)]
    files["xlsx"] = [_workbook(table.drop_columns("vector"))]
    files["jsonl"] = ["".join(json.dumps(row) + "\n" for row in rows).encode()]
    files["parquet"] = [_parquet(table, x) for x in ("snappy", "zstd", "none")]
    return files


def _workbook(table: pa.Table) -> bytes:
    """Return an .xlsx file of a table, not compressed, so that mutations meet its XML."""
    packed, contents = io.BytesIO(), io.BytesIO()
    book = openpyxl.Workbook()
    for row in [table.column_names, *zip(*table.to_pydict().values(), strict=True)]:
        book.active.append(list(row))
    book.save(packed)
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(contents, "w") as new:
        for name in old.namelist():
            part = re.sub(rb"\d{4}-\d\d-\d\dT[\d:]+Z", b"2026-01-01T00:00:00Z", old.read(name))
            new.writestr(zipfile.ZipInfo(name), part)
    return contents.getvalue()


def _picture(picture: Image.Image, suffix: str) -> bytes:
    contents = io.BytesIO()
    kind = {"jpg": "jpeg"}.get(suffix, suffix)
    picture.save(contents, kind)
    return contents.getvalue()


def _stored(save: Callable[..., Any], array: np.ndarray) -> bytes:
    contents = io.BytesIO()
    save(contents, array)
    return contents.getvalue()


def _parquet(table: pa.Table, compression: str) -> bytes:
    contents = io.BytesIO()
    pq.write_table(table, contents, compression=compression)
    return contents.getvalue()


@cache
def model_folder(folder: Path) -> Path:
    """Save a model with a tiny BERT, its tokenizer and an encoder of vectors."""
    from transformers import BertConfig, BertModel, BertTokenizer

    source = folder / "source"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=16, vocab_size=16)).save_pretrained(source)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat"]
    (source / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(vocab=str(source / "vocab.txt")).save_pretrained(source)
    encoders: dict[str, Any] = {
        "text": f"hf/{source}",
        "vector": {"name": "vector/mlp", "in_dim": 3, "dim": 8, "hidden": 8},
    }
    model = fusionzoo.create_model({"name": "gmu", "dim": 8}, encoders, classes=["a", "b"])
    return model.save(folder / "model")


def mutate(contents: bytes, others: list[bytes], draw: random.Random) -> tuple[str, bytes]:
    """Return the name of a random mutation, and the mutated contents."""
    name = draw.choice(("flip", "flip", "truncate", "header", "header", "splice", "numbers"))
    data = bytearray(contents)
    if name == "flip":
        for _ in range(draw.choice((1, 2, 8, 64))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif name == "truncate":
        del data[draw.randrange(len(data)) :]
    elif name == "header":
        start = draw.randrange(min(64, len(data)))
        for offset in range(start, min(start + draw.choice((1, 2, 4, 8)), len(data))):
            data[offset] = draw.choice((0, 0xFF, 0x7F, 0x80, draw.randrange(256)))
    elif name == "splice":
        donor = draw.choice([contents, *others])
        start, length = draw.randrange(len(donor)), draw.randrange(1, 400)
        position = draw.randrange(len(data))
        end = position + draw.choice((0, length))
        data[position:end] = donor[start : start + length]
    else:  # other digits in text and in headers of text
        digits = [i for i, byte in enumerate(data) if 48 <= byte < 58] or [0]
        for _ in range(draw.choice((1, 3))):
            position = draw.choice(digits)
            data[position : position + 1] = draw.choice((b"9" * 12, b"-1", b"0", b"", b"1e999"))
    return name, bytes(data)
