"""Answer raw samples: python example.py image=cat.png text="a cat" audio=cat.ogg

Leave out what a sample lacks.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import onnxruntime

HERE, Inputs = Path(__file__).parent, dict[str, Any]
FILES = ("preprocess.json", "labels.json")
ABOUT, LABELS = (json.loads((HERE / name).read_text("utf-8")) for name in FILES)
SESSION = onnxruntime.InferenceSession(HERE / "model.onnx", providers=["CPUExecutionProvider"])


def image(path: Any, by: Any) -> Inputs:
    from PIL import Image, ImageOps

    drawn = ImageOps.exif_transpose(Image.open(path) if path else Image.new("RGB", (8, 8)))
    white = Image.new("RGBA", drawn.size, "white")
    picture = Image.alpha_composite(white, drawn.convert("RGBA")).convert("RGB")
    (high, wide), (tall, broad) = by["size"], by["resized"]
    if by["fit"] == "pad":
        scale = max(picture.height / high, picture.width / wide)
        canvas = (max(picture.width, round(wide * scale)), max(picture.height, round(high * scale)))
        padded = Image.new("RGB", canvas, "white")
        padded.paste(picture, ((canvas[0] - picture.width) // 2, (canvas[1] - picture.height) // 2))
        picture, (tall, broad) = padded, (high, wide)
    if by["fit"] == "crop":
        if tall == broad:
            shorter = min(picture.size)
            tall, broad = (int(tall * x / shorter) for x in (picture.height, picture.width))
        else:
            ratio = min(picture.height / tall, picture.width / broad)
            tall = max(tall, round(picture.height / ratio))
            broad = max(broad, round(picture.width / ratio))
    resized = picture.resize((broad, tall), Image.Resampling[by["interpolation"].upper()])
    corner = math.floor if by["rounds_down"] else round
    top, left = corner((tall - high) / 2), corner((broad - wide) / 2)
    return {"pixels": np.asarray(resized)[top:, left:][:high, :wide].transpose(2, 0, 1)}


def wave(path: Any, by: Any) -> Inputs:
    import soundfile

    sound, rate = soundfile.read(path, always_2d=True) if path else (np.zeros((1, 1)), by["rate"])
    sound, common, edge = sound.mean(1), math.gcd(rate, by["rate"]), by["zero_crossings"]
    old, new = rate // common, by["rate"] // common
    if old != new:  # a windowed sinc: a filter for each sample of a period
        cutoff = by["roll_off"] * min(old, new)
        margin = math.ceil(edge * old / cutoff)
        time = np.arange(-margin, margin + old) / old - np.arange(new)[:, None] / new
        time = (time * cutoff).clip(-edge, edge)
        filters = np.sinc(time) * np.cos(time * math.pi / edge / 2) ** 2 * cutoff / old
        padded = np.pad(sound, (margin, margin + old))
        periods = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])[::old]
        sound = (periods @ filters.T).ravel()[: -(-len(sound) * new // old)]
    sound = sound[max(0, len(sound) - by["most"]) // 2 :][: by["most"]]
    if by["step"]:
        step = round(by["step"] * by["rate"])
        sound = np.pad(sound, (0, max(step, -(-len(sound) // step) * step) - len(sound)))
    stored = np.rint(sound.clip(-1, 1) * by["peak"]).astype(np.int16)
    return {"wave": stored, "lengths": np.int64(len(stored))}


def bytes(value: Any, by: Any) -> Inputs:
    ids = [by["start"], *normalize("NFC", value or "").encode()][: by["max_length"]]
    return {"input_ids": np.array(ids), "attention_mask": np.ones(len(ids), bool)}


def tokenizer(value: Any, by: Any) -> Inputs:
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(HERE / by["file"]))
    line = by["prompt"] + normalize("NFC", value or "")
    ids = reader.encode(line.lower() if by["lower_case"] else line).ids or [by["pad_id"]]
    return {"input_ids": np.array(ids), "attention_mask": np.ones(len(ids), bool)}


def vector(value: Any, by: Any) -> Inputs:
    return {"values": np.asarray([0] * by["width"] if value is None else value, np.float32)}


def sequence(value: Any, by: Any) -> Inputs:
    steps = np.asarray([[0] * by["width"]] if value is None else value, np.float32)
    steps = steps[: by["max_length"]]
    return {"values": steps, "lengths": np.int64(len(steps))}


def tabular(cells: Any, by: Any) -> Inputs:
    values, codes, known = [], [], []
    for column in by["columns"]:
        cell = (cells or {}).get(column["name"])
        cell = normalize("NFC", cell) if isinstance(cell, str) else cell
        is_number, names = "mean" in column and cell is not None, column.get("values", [])
        scaled = (float(cell) - column["mean"]) / column["std"] if is_number else 0.0
        values.append(min(100.0, max(-100.0, scaled)))
        codes.append(1 if cell is None else names.index(cell) + 2 if cell in names else 0)
        known.append(cell is not None)
    codes = [0 if "mean" in x else code for x, code in zip(by["columns"], codes, strict=True)]
    return {"values": np.float32(values), "codes": np.array(codes), "known": np.array(known)}


def classification(x: Any, target: Any) -> Any:
    shares = np.exp(x - x.max())
    return dict(zip(target["classes"], (shares / shares.sum()).tolist(), strict=True))


def multilabel(x: Any, target: Any) -> Any:
    return dict(zip(target["classes"], (1 / (1 + np.exp(-x))).tolist(), strict=True))


def regression(x: Any, target: Any) -> Any:
    return float(x[0] * target["deviation"] + target["mean"])


def ordinal(x: Any, target: Any) -> Any:
    above = np.concatenate([[1], (1 / (1 + np.exp(-x))).cumprod(), [0]])
    return dict(zip(target["classes"], (above[:-1] - above[1:]).tolist(), strict=True))


def answer(sample: dict[str, Any]) -> dict[str, Any]:
    """Return {target: answer}: a probability of each class, or a number."""
    inputs = {"present": np.array([[sample.get(name) is not None for name in ABOUT["modalities"]]])}
    for name, about in ABOUT["modalities"].items():
        prepare = globals()[about["processor"]["by"]]
        for key, x in prepare(sample.get(name), about["processor"]).items():
            inputs[f"{name}.{key}"] = x[None]
    read = {one.name: inputs[one.name] for one in SESSION.get_inputs()}
    x = SESSION.run(["logits"], read)[0][0].astype(np.float64)
    targets = [(t, x[t["first"] : t["last"]]) for t in LABELS["decode"]]
    return {t["name"]: globals()[t["kind"]](logits, t) for t, logits in targets}


if __name__ == "__main__":
    print(json.dumps(answer(dict(word.split("=", 1) for word in sys.argv[1:])), indent=1))
