"""Answer raw samples: python example.py image=cat.png text="a cat" tabular='{"age": 31}'

Leave out what a sample lacks; numbers and cells are JSON.
"""

import datetime
import json
import math
import re
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
    if drawn.mode[0] in "IF":  # of 16 or 32 bits
        if not (by["range"] or drawn.mode.startswith("I;16") or drawn.format == "PNG"):
            raise ValueError("an image of 32 bits, of which the model knows no range")
        low, high = by["range"] or (0, 65535)
        shades = (np.asarray(drawn).astype(float) - low) * (255 / (high - low))
        drawn = Image.fromarray(shades.clip(0, 255).astype(np.uint8))
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
    if by["least"]:
        sound = np.pad(sound, (0, max(0, round(by["least"] * by["rate"]) - len(sound))))
    stored = np.rint(sound.clip(-1, 1) * by["peak"]).astype(np.int16)
    return {"wave": stored, "lengths": np.int64(len(stored))}


def text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"a {type(value).__name__} is not text")
    return normalize("NFC", value or "")


def bytes(value: Any, by: Any) -> Inputs:
    ids = [by["start"], *text(value).encode()][: by["max_length"]]
    return {"input_ids": np.array(ids), "attention_mask": np.ones(len(ids), bool)}


def tokenizer(value: Any, by: Any) -> Inputs:
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(HERE / by["file"]))
    line = by["prompt"] + text(value)
    ids = reader.encode(line.lower() if by["lower_case"] else line).ids or [by["pad_id"]]
    return {"input_ids": np.array(ids), "attention_mask": np.ones(len(ids), bool)}


def numbers(value: Any, shape: tuple[int, ...]) -> Any:
    x = np.zeros(np.abs(shape)) if value is None else np.asarray(value)
    x = x.astype(np.float32)
    if x.ndim != len(shape) or x.shape[-1] != shape[-1] or not (x.size and np.isfinite(x).all()):
        raise ValueError(f"expected finite numbers, {shape[-1]} a row, got {str(value)[:60]}")
    return x


def vector(value: Any, by: Any) -> Inputs:
    return {"values": numbers(value, (by["width"],))}


def sequence(value: Any, by: Any) -> Inputs:
    steps = numbers(value, (-1, by["width"]))[: by["max_length"]]
    return {"values": steps, "lengths": np.int64(len(steps))}


def fold(name: str) -> str:
    return normalize("NFC", name).strip().casefold()


def cell_of(value: Any, by: Any) -> Any:
    if isinstance(value, str):
        return None if value.strip() in ("", *by["missing"]) else value.strip()
    if not isinstance(value, int | float | None):
        raise ValueError(f"a {type(value).__name__} is neither a number nor text")
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None or np.isnan(value) else value


def with_point(text: str, by: Any) -> str:
    return re.sub(f"^{by['comma']}$", r"\1.\2", text) if by["comma"] else text


def number(cell: Any, how: Any, by: Any) -> float:
    plain, pattern = str(cell), how.get("pattern", "(.*)")
    if whole := re.fullmatch(pattern, plain):
        plain = next(x for x in whole.groups() if x is not None)
        if "pattern" in how and re.fullmatch(how["thousands"], plain):
            plain = re.sub(how["between"], "", plain)
    plain = with_point(plain, by)
    if not (re.fullmatch(by["number"], plain) and np.isfinite(float(plain))):
        raise ValueError(f"column {how['name']!r}: {cell!r} is not a number of this model")
    return float(plain)


def category(cell: Any, by: Any) -> str:
    if not isinstance(cell, str):
        return str(int(cell)) if float(cell).is_integer() else repr(float(cell))
    text = re.sub(r"^(-?[0-9]+)\.0+$", r"\1", normalize("NFC", with_point(cell, by)))
    return text.lower() if text.lower() in ("true", "false") else text


def date(cell: Any, how: Any) -> dict[str, Any]:
    tried = [(re.fullmatch(x, str(cell)), names) for x, names in how["patterns"]]
    read = next((dict(zip(names, x.groups("0"), strict=True)) for x, names in tried if x), {})
    start = datetime.date(1970, 1, 1)
    clock = [float(read.get(x, "0").replace(",", ".")) for x in how["clock"]]
    try:
        if "serial" in read:  # days of a spreadsheet
            if not 1 <= float(read["serial"]) <= 2958465:
                raise ValueError
            seconds = (float(read["serial"]) - 25569) * 86400
        else:
            year = int(read["year"])
            year += (len(read["year"]) == 2) * (1900 if year >= 70 else 2000)
            day = datetime.date(year, int(read["month"]), int(read["day"]))
            seconds = (day - start).days * 86400
            seconds += sum(x * y for x, y in zip(clock, (3600, 60, 1), strict=False))
            west = -1 if read.get("ahead", "").startswith("-") else 1
            seconds -= how["timed"] * 3600 * float(read.get("ahead", 0))
            seconds -= how["timed"] * 60 * west * float(read.get("minutes_ahead", 0))
        days, rest = divmod(round(seconds, 3), 86400)
        on = start + datetime.timedelta(days)
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"column {how['name']!r}: {cell!r} is no date of this model") from None
    weekday = how["weekdays"][on.weekday()]
    parts = (on.year, days, str(on.month), weekday, rest / 3600)
    return dict(zip(how["parts"], parts, strict=False))


def tabular(cells: Any, by: Any) -> Inputs:
    hows, row = {fold(x["name"]): x for x in by["cells"]}, {}
    for name, value in (dict.fromkeys(hows) if cells is None else cells).items():
        cell, how = cell_of(value, by), hows.get(fold(name), {})
        read = {fold(name): cell}
        if "parts" in how:
            parts = dict.fromkeys(how["parts"]) if cell is None else date(cell, how)
            read = {f"{fold(name)} {part}": x for part, x in parts.items()}
        if read.keys() & row.keys():
            raise ValueError(f"column {name!r} is there twice")
        row |= read
    if odd := row.keys() ^ {fold(x["name"]) for x in by["columns"]}:
        raise ValueError(f"columns that are missing, or not of this model: {', '.join(odd)}")
    values, codes, known = [], [], []
    for column in by["columns"]:
        key = fold(column["name"])
        cell, is_number, scaled, code = row[key], "mean" in column, 0.0, 0
        if cell is not None and is_number:
            scaled = (number(cell, hows.get(key, column), by) - column["mean"]) / column["std"]
        elif not is_number:
            word = None if cell is None else category(cell, by)
            code = 1 if cell is None else [*column["values"], word].index(word) + 2
        values.append(min(100.0, max(-100.0, scaled)))
        codes.append(0 if code == len(column.get("values", ())) + 2 else code)
        known.append(cell is not None)
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
    if odd := sample.keys() - ABOUT["modalities"].keys():
        raise ValueError(f"the model reads {', '.join(ABOUT['modalities'])}, not {', '.join(odd)}")
    inputs, present = {}, []
    for name, about in ABOUT["modalities"].items():
        prepare, value = globals()[about["processor"]["by"]], sample.get(name)
        try:
            prepared = prepare(value, about["processor"])
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise ValueError(f"{name}: {error}") from error
        present.append(value is not None and bool(np.any(prepared.get("known", True))))
        inputs |= {f"{name}.{key}": x[None] for key, x in prepared.items()}
    inputs["present"] = np.array([present])
    read = {one.name: inputs[one.name] for one in SESSION.get_inputs()}
    x = SESSION.run(["logits"], read)[0][0].astype(np.float64)
    targets = [(t, x[t["first"] : t["last"]]) for t in LABELS["decode"]]
    return {t["name"]: globals()[t["kind"]](logits, t) for t, logits in targets}


if __name__ == "__main__":
    AS_TEXT = ("image", "wave", "bytes", "tokenizer")
    sample = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    try:
        for name, about in ABOUT["modalities"].items():
            if name in sample and about["processor"]["by"] not in AS_TEXT:
                sample[name] = json.loads(sample[name])
        print(json.dumps(answer(sample), indent=1))
    except ValueError as error:
        sys.exit(f"error: {error}")
