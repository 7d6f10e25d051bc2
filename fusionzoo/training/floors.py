"""Floors: what a linear model and boosted trees make of the same columns and features.

They are rows of the final table, fitted in seconds on the same splits; a fusion that does not beat
them is not worth its training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn.functional import one_hot

from fusionzoo.distributed import World
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.tabular import FIRST, MISSING, TabularEncoder
from fusionzoo.features.frozen import StoredModality
from fusionzoo.structures import Features

from .fit import Loaders
from .fitted.components import Trees
from .fitted.linear import Linear
from .fitted.method import Inputs, Method, Setting
from .loaders import build_loader
from .trainer import Trainer

MOST = 20_000_000  # numbers of the training split, beyond which nothing is fitted
MOST_TREES = 10_000  # training rows times logits, beyond which no trees are grown
GROWN: Setting = {"rate": 0.1, "leaves": 31}  # scikit-learn's defaults


class _Samples(NamedTuple):
    """What the models read of the samples of a split, and their labels."""

    inputs: Inputs
    targets: Tensor


def floors(trainer: Trainer, loaders: Loaders) -> dict[str, dict[str, float]]:
    """Return the test metrics of each floor, by its line in the table.

    They learn from train and validation together, the linear model with the penalty that is best on
    validation. They read the cells of tables, vectors and cached features of frozen encoders; where
    other modalities are trained from scratch, the lines name those that are read. Rows with weights
    of their own have no floor.
    """
    tasks, encoders = trainer.module.tasks, dict(trainer.module.model.named_encoders())
    if "val" not in loaders or not tasks.has_target or trainer.module.mean_weight is not None:
        return {}
    collate: Any = loaders["val"].collate_fn
    read = {x: y for x, y in encoders.items() if _is_read(y, collate.processors[x])}
    if not read:
        return {}
    train, val, test = (_rows(trainer, loaders, x, read) for x in ("train", "val", "test"))
    if not train.inputs.present.any() or train.inputs.side_by_side.size > MOST:
        return {}
    known, to_validate, asked = (_standardised(train.inputs, x.inputs) for x in (train, val, test))
    both = _Samples(_joined(known, to_validate), torch.cat([train.targets, val.targets]))
    linear, what = Linear(), "everything" if len(read) == len(encoders) else ", ".join(read)

    def validated(setting: Setting) -> tuple[float]:
        logits = linear.answer(tasks, known, train.targets, to_validate, setting)
        return (float(tasks.criterion(logits, val.targets).mean()),)

    with threadpool_limits(1):  # more are slower, for problems of this size
        methods: dict[str, tuple[Method, Setting]] = {
            f"linear on {what}": (linear, linear.choose(validated)[0])
        }
        has_cells = any(isinstance(encoder, TabularEncoder) for encoder in read.values())
        if has_cells and len(both.targets) * sum(tasks.widths) <= MOST_TREES:
            methods[f"boosted trees on {what}"] = Trees(), GROWN
        answers = {
            line: method.answer(tasks, *both, asked, setting)
            for line, (method, setting) in methods.items()
        }
    return {x: tasks.metrics(logits, test.targets, slow=True) for x, logits in answers.items()}


def _is_read(encoder: Encoder, processor: Any) -> bool:
    is_plain = encoder.kind == "vector" or isinstance(encoder, TabularEncoder)
    return is_plain or isinstance(processor, StoredModality)


def _rows(
    trainer: Trainer, loaders: Loaders, split: str, encoders: Mapping[str, Encoder]
) -> _Samples:
    """Read a split once, in its order."""
    dataset: Any = loaders[split].dataset
    loader = build_loader(dataset, loaders["val"].collate_fn, trainer.cfg, World(), "val")
    columns = [*trainer.module.model.encoders]
    places = [columns.index(name) for name in encoders]
    parts, present, targets = [], [], []
    for batch in loader:
        assert batch.target is not None
        there = batch.present[:, places]
        numbers = [_numbers(encoder, batch.inputs[x]) for x, encoder in encoders.items()]
        pairs = zip(numbers, there.unbind(1), strict=True)
        parts.append([torch.where(has[:, None], x, 0).double() for x, has in pairs])
        present.append(there)
        targets.append(batch.target)
    matrices = tuple(torch.cat(x).numpy() for x in zip(*parts, strict=True))
    return _Samples(Inputs(matrices, torch.cat(present).numpy()), torch.cat(targets))


def _numbers(encoder: Encoder, inputs: Any) -> Tensor:
    """Return what the models read of a batch of one modality, (B, D)."""
    if isinstance(inputs, Features):
        return inputs.pooled
    if not isinstance(encoder, TabularEncoder):
        values: Tensor = inputs["values"]
        return values
    numbers, missing = encoder.numbers(inputs)
    codes, known = encoder.codes(inputs)
    sizes = [FIRST + len(column.values) for column in encoder.categories]
    seen = codes.where(known, MISSING).unbind(1)
    hot = [one_hot(code.long(), size) for code, size in zip(seen, sizes, strict=True)]
    return torch.cat([numbers, missing, *hot], 1)


def _joined(first: Inputs, second: Inputs) -> Inputs:
    pairs = zip(first.parts, second.parts, strict=True)
    present = np.concatenate([first.present, second.present])
    return Inputs(tuple(np.concatenate(pair) for pair in pairs), present)


def _standardised(by: Inputs, inputs: Inputs) -> Inputs:
    """Return inputs whose columns have mean 0 and deviation 1 where `by` has the modality."""
    parts = []
    for place, (learned, part) in enumerate(zip(by.parts, inputs.parts, strict=True)):
        rows = learned[by.present[:, place]]
        mean, deviation = (rows.mean(0), rows.std(0)) if len(rows) else (0.0, np.ones(1))
        scaled = (part - mean) / np.where(deviation > 0, deviation, 1)
        parts.append(scaled * inputs.present[:, place, None])
    return inputs._replace(parts=tuple(parts))
