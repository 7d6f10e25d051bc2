"""What `preprocess.json` says: how raw values become a graph's inputs, without fusionzoo's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fusionzoo.datasets.media.ranges import range_of
from fusionzoo.datasets.opening.raw_rows import cell_settings
from fusionzoo.datasets.sources.cell_kinds import DATE, NUMBER, date_patterns, number_patterns
from fusionzoo.datasets.sources.columns import COMMA_NUMBER
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.audio import PEAK, WaveProcessor
from fusionzoo.encoders.base import Processor
from fusionzoo.encoders.image import ImageEncoder, ImageProcessor, Preparation
from fusionzoo.encoders.tabular import Numbers, TabularProcessor, read_columns
from fusionzoo.encoders.text import BytesProcessor, TokenizerProcessor
from fusionzoo.encoders.vector import SequenceProcessor, VectorProcessor
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import DATE_PARTS, fold
from fusionzoo.ground.cells import NUMBER as NUMBER_PATTERN
from fusionzoo.ground.resampling import ROLL_OFF, ZERO_CROSSINGS

TOKENIZER = "tokenizer.json"
OWN = "own"  # a processor that no other program can rebuild


def describe(encoder: Encoder, folder: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an encoder's processor in plain values, of data that were read as in `stored`; its
    files go into `folder`, which may not exist yet."""
    processor = encoder.processor(False)
    if getattr(processor, "num_windows", 1) > 1:
        raise FusionZooError(
            f"{encoder.modality}: a graph takes one item a row, and the encoder splits a long clip"
            " into windows; set windows=1"
        )
    make = DESCRIPTIONS.get(type(processor))
    if make is None:
        return {"by": OWN, "processor": type(processor).__name__}
    described = make(processor, encoder.reader, folder)
    return described | _reading(encoder.kind, encoder.modality, described, stored)


def _image(processor: ImageProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    preparation = processor.preparation
    described = {
        "by": "image",
        "size": list(preparation.size),
        "resized": list(preparation.before_crop),
        "rounds_down": preparation.rounds_down,
        "fit": preparation.fit,
        "interpolation": preparation.interpolation,
    }
    if isinstance(encoder, ImageEncoder):  # of pixels in [0, 1]; the graph applies them
        std = 1 / (255 * encoder.scale.flatten())
        mean = -encoder.shift.flatten() * std
        described |= {"mean": mean.tolist(), "std": std.tolist(), "normalised_by": "graph"}
    return described


def _bytes(processor: BytesProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    return {"by": "bytes", "start": 256, "max_length": processor.max_length, "pad_id": 0}


def _tokenizer(processor: TokenizerProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    backend = getattr(processor.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FusionZooError(
            f"{encoder.modality}: its tokenizer, {type(processor.tokenizer).__name__}, cannot be"
            f" stored as {TOKENIZER}, which other programs read"
        )
    from tokenizers import Tokenizer

    stored = Tokenizer.from_str(backend.to_str())
    stored.no_padding()
    stored.enable_truncation(processor.max_length)
    folder.mkdir(parents=True, exist_ok=True)
    stored.save(str(folder / TOKENIZER))
    return {
        "by": "tokenizer",
        "file": f"{folder.name}/{TOKENIZER}",
        "max_length": processor.max_length,
        "pad_id": processor.pad_id,
        "prompt": processor.prompt,
        "lower_case": processor.lower_case,
    }


def _wave(processor: WaveProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    described = {
        "by": "wave",
        "rate": processor.rate,
        "longest": processor.longest,
        "most": round(processor.longest * processor.rate),  # samples; of a longer clip the middle
        "least": processor.least,
        "peak": PEAK,
        "resampling": "sinc times cos^2, as in fusionzoo/ground/resampling.py and torchaudio",
        "zero_crossings": ZERO_CROSSINGS,
        "roll_off": ROLL_OFF,
    }
    mel = getattr(encoder, "mel", None)
    if mel is not None:
        shape = {"n_fft": mel.n_fft, "window": mel.win_length, "hop": mel.hop}
        described["mel"] = {**shape, "bands": mel.filters.shape[1], "computed_by": "graph"}
    return described


def _vector(processor: VectorProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    return {"by": "vector", "width": processor.in_dim}


def _sequence(processor: SequenceProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    return {"by": "sequence", "width": processor.in_dim, "max_length": processor.max_length}


def _tabular(processor: TabularProcessor, encoder: Any, folder: Path) -> dict[str, Any]:
    columns = [
        {"name": x.name, "mean": x.mean, "std": x.std}
        if isinstance(x, Numbers)
        else {"name": x.name, "values": list(x.values)}
        for x in processor.columns
    ]
    return {"by": "tabular", "columns": columns}


def _reading(kind: str, name: str, described: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Describe how the values of a table become those that a processor takes."""
    if kind == "image":
        return {"range": range_of(stored.get("image_range"), name)}
    if described["by"] != "tabular":
        return {}
    settings = TableSettings.of(cell_settings(stored, name))
    comma = settings.decimal == ","
    cells: dict[str, dict[str, Any]] = {}
    for column in (x["name"] for x in described["columns"]):
        table_column, _, part = column.rpartition(" ")
        date = settings.cell_kinds.get(fold(table_column), "")
        word, _, detail = settings.cell_kinds.get(fold(column), "").partition(" ")
        if date.startswith(DATE) and part in DATE_PARTS:
            cells[table_column] = {"name": table_column, **date_patterns(date)}
        elif word == NUMBER:
            cells[column] = {"name": column, **number_patterns(detail, comma)}
        else:
            cells[column] = {"name": column}
    return {
        "cells": [*cells.values()],  # of the table; a date's make several columns
        "number": NUMBER_PATTERN,
        "comma": COMMA_NUMBER if comma else "",
        "missing": settings.missing_words(has_nulls=True),
    }


DESCRIPTIONS: dict[type[Processor], Callable[[Any, Any, Path], dict[str, Any]]] = {
    ImageProcessor: _image,
    BytesProcessor: _bytes,
    TokenizerProcessor: _tokenizer,
    WaveProcessor: _wave,
    VectorProcessor: _vector,
    SequenceProcessor: _sequence,
    TabularProcessor: _tabular,
}


def build(described: Mapping[str, Any], folder: Path, modality: str) -> Processor:
    """Return the processor that `describe` described; its files are below `folder`."""
    by = described.get("by")
    if by == "image":
        facts = {name: described[name] for name in ("fit", "interpolation", "rounds_down")}
        size, resized = ((x[0], x[1]) for x in (described["size"], described["resized"]))
        return ImageProcessor(Preparation(size=size, resized=resized, **facts))
    if by == "bytes":
        return BytesProcessor(described["max_length"])
    if by == "tokenizer":
        return _read_tokenizer(described, folder)
    if by == "wave":
        return WaveProcessor(described["rate"], described["longest"], described["least"])
    if by == "vector":
        return VectorProcessor(described["width"])
    if by == "sequence":
        return SequenceProcessor(described["width"], described["max_length"])
    if by == "tabular":
        return TabularProcessor(read_columns(described["columns"]))
    raise FusionZooError(
        f"{modality}: its processor ({described.get('processor', by)}) is code of its own: run the"
        " graph on inputs that you prepare, `OnnxModel.run`"
    )


def _read_tokenizer(described: Mapping[str, Any], folder: Path) -> TokenizerProcessor:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / described["file"]))
    processor = TokenizerProcessor(
        tokenizer, described["max_length"], described["prompt"], described["lower_case"]
    )
    processor.pad_id = described["pad_id"]
    return processor
