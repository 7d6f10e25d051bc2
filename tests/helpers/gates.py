"""Gates whose parts are known, as tables and as noisy vectors."""

from __future__ import annotations

import numpy as np

from fusionzoo.evaluation.pid import FoldFeatures, PidInputs

GATES = {
    "and": (lambda a, b: (a, b, a & b), (0.3113, 0, 0, 0.5)),
    "xor": (lambda a, b: (a, b, a ^ b), (0, 0, 0, 1)),
    "copy": (lambda a, b: (a, a, a), (1, 0, 0, 0)),
    "unique": (lambda a, b: (a, b, a), (0, 1, 0, 0)),
}


def table_of(name: str) -> np.ndarray:
    table = np.zeros((2, 2, 2))
    for a in (0, 1):
        for b in (0, 1):
            table[GATES[name][0](a, b)] += 0.25
    return table


def planted(name: str, samples: int = 4000, *, fixed: bool = True) -> PidInputs:
    """Noisy vectors of the two bits of a gate, in five folds."""
    draw = np.random.default_rng(0)
    bits = np.tile([[0, 0, 1, 1], [0, 1, 0, 1]], samples // 4)
    first, second, target = GATES[name][0](*bits)
    noise = 0.1 * draw.standard_normal((2, samples, 4))
    features = {"a": first[:, None] + noise[0], "b": second[:, None] + noise[1]}
    folds = folds_of(features, target.astype(np.int64), draw)
    return PidInputs(folds=folds, classes=2, clusters=2, seed=0, fixed=fixed)


def folds_of(
    features: dict[str, np.ndarray], target: np.ndarray, draw: np.random.Generator
) -> list[FoldFeatures]:
    order = draw.permutation(len(target))
    known = {"features": features, "target": target}
    known["present"] = dict.fromkeys(features, np.ones(len(target), bool))
    parts = np.array_split(order, 5)
    return [FoldFeatures(**known, train=np.setdiff1d(order, x), test=x) for x in parts]


def planted_letters() -> PidInputs:
    """Ten classes in five folds: audio tells nearly all, half of its width tells the speaker
    instead, as clusters then do; text tells most."""
    samples, draw = 679, np.random.default_rng(0)
    target, speaker = draw.integers(10, size=samples), draw.integers(4, size=samples)
    noise = draw.standard_normal((2, samples, 48))
    letters, speakers = draw.standard_normal((10, 16)), draw.standard_normal((4, 32))
    audio = np.concatenate([letters[target], 2.5 * speakers[speaker]], axis=1) + 0.7 * noise[0]
    text = draw.standard_normal((10, 16))[target] + 0.9 * noise[1, :, :16]
    folds = folds_of({"audio": audio, "text": text}, target, draw)
    return PidInputs(folds=folds, classes=10, clusters=None, seed=0, fixed=True)
