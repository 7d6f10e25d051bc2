"""Floors: what a linear model and boosted trees make of the same columns and features.

They are rows of the final table, fitted in seconds on the same splits; a fusion that does not beat
them is not worth its training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fusionzoo.encoders import Encoder
from fusionzoo.encoders.tabular import TabularEncoder
from fusionzoo.features.frozen import StoredModality
from fusionzoo.machine.distributed import World, from_main
from fusionzoo.structures import Features

from .average import ToAverage, can_average
from .fit import Loaders
from .fitted.components import Trees
from .fitted.linear import Linear
from .fitted.method import Inputs, Setting
from .loaders import build_loader
from .trainer import Trainer

FLOORS, LINEAR = "floors", "linear"  # keys in a run's metrics: of all columns, of each modality
MOST = 20_000_000  # numbers of the training split, beyond which nothing is fitted
MOST_TREES = 10_000  # training rows times logits, beyond which no trees are grown
GROWN: Setting = {"rate": 0.1, "leaves": 31}  # scikit-learn's defaults


class _Samples(NamedTuple):
    """What the models read of the samples of a split, and their labels."""

    inputs: Inputs
    targets: Tensor
    ids: list[str]


class Floors(NamedTuple):
    """Logits of the test samples, (N, K), and what `average_linear` asks for."""

    ids: Sequence[str] = ()  # of the samples
    of_all: Mapping[str, Tensor] = {}  # by their line in the table
    of_one: Mapping[str, Tensor] = {}  # modality -> that of a linear model of it
    to_average: ToAverage | None = None


def floors(trainer: Trainer, loaders: Loaders) -> Floors:
    """Return what the floors answer to the test samples, fitted by the main process.

    They learn from train and validation together, linear models with the penalty that is best on
    validation. They read the cells of tables, vectors and cached features of frozen encoders; where
    other modalities are trained from scratch, the lines name those that are read. Rows with weights
    of their own have no floor.
    """
    if not trainer.cfg.train.floors:
        return Floors()
    world = trainer.world
    return from_main(_fitted(trainer, loaders) if world.main else None, world)


def _fitted(trainer: Trainer, loaders: Loaders) -> Floors:
    tasks, encoders = trainer.module.tasks.on_cpu(), dict(trainer.module.model.named_encoders())
    if "val" not in loaders or not tasks.has_target or trainer.module.mean_weight is not None:
        return Floors()
    collate: Any = loaders["val"].collate_fn
    read = {x: y for x, y in encoders.items() if _is_read(y, collate.processors[x])}
    if not read:
        return Floors()
    train, val, test = (_rows(trainer, loaders, x, read) for x in ("train", "val", "test"))
    if not train.inputs.present.any() or train.inputs.side_by_side.size > MOST:
        return Floors()
    known, to_validate, asked = (_standardised(train.inputs, x.inputs) for x in (train, val, test))
    learnt, labels = _joined(known, to_validate), torch.cat([train.targets, val.targets])
    model, what = Linear(), "everything" if len(read) == len(encoders) else ", ".join(read)

    def linear(*places: int) -> tuple[Tensor, Setting]:
        learned, validated, tested, all_learned = (
            _some(x, places) for x in (known, to_validate, asked, learnt)
        )

        def loss(setting: Setting) -> tuple[float]:
            logits = model.answer(tasks, learned, train.targets, validated, setting)
            return (float(tasks.criterion(logits, val.targets).mean()),)

        setting = model.choose(loss)[0]
        return model.answer(tasks, all_learned, labels, tested, setting), setting

    with threadpool_limits(1):  # more are slower, for problems of this size
        everything, setting = linear(*range(len(read)))
        of_all = {f"linear on {what}": everything}
        has_cells = any(isinstance(encoder, TabularEncoder) for encoder in read.values())
        if has_cells and len(labels) * sum(tasks.widths) <= MOST_TREES:
            of_all[f"boosted trees on {what}"] = Trees().answer(tasks, learnt, labels, asked, GROWN)
        of_one = {}
        if len(encoders) > 1:
            of_one = {x: linear(n)[0] if len(read) > 1 else everything for n, x in enumerate(read)}
        to_average = None
        if trainer.cfg.train.average_linear and can_average(trainer, read):
            pairs = (known, train.targets), (learnt, labels)
            maps = [model.linear_map(tasks, *pair, setting) for pair in pairs]
            raw = [x.of_raw(train.inputs) for x in maps if x is not None]
            if maps[0] is not None and len(raw) == len(maps):
                to_average = ToAverage([*read], raw[0], raw[1], val.ids, maps[0](to_validate))
    return Floors(test.ids, of_all, of_one, to_average)


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
    parts, present, targets, ids = [], [], [], []
    for batch in loader:
        assert batch.target is not None
        inputs = batch.to(trainer.world.device).inputs
        numbers = [_numbers(encoder, inputs[x]).cpu() for x, encoder in encoders.items()]
        finite = torch.stack([x.isfinite().all(1) for x in numbers], 1)  # else training skips it
        there = batch.present[:, places] & finite
        pairs = zip(numbers, there.unbind(1), strict=True)
        parts.append([torch.where(has[:, None], x, 0).double() for x, has in pairs])
        present.append(there)
        targets.append(batch.target)
        ids += batch.ids
    matrices = tuple(torch.cat(x).numpy() for x in zip(*parts, strict=True))
    return _Samples(Inputs(matrices, torch.cat(present).numpy()), torch.cat(targets), ids)


def _numbers(encoder: Encoder, inputs: Any) -> Tensor:
    """Return what the models read of a batch of one modality, (B, D)."""
    if isinstance(inputs, Features):
        return inputs.pooled
    if isinstance(encoder, TabularEncoder):
        return encoder.linear_inputs(inputs)
    values: Tensor = inputs["values"]
    return values


def _some(inputs: Inputs, places: Sequence[int]) -> Inputs:
    """Return some of the modalities."""
    return Inputs(tuple(inputs.parts[x] for x in places), inputs.present[:, [*places]])


def _joined(first: Inputs, second: Inputs) -> Inputs:
    pairs = zip(first.parts, second.parts, strict=True)
    present = np.concatenate([first.present, second.present])
    return Inputs(tuple(np.concatenate(pair) for pair in pairs), present)


def _standardised(by: Inputs, inputs: Inputs) -> Inputs:
    """Return inputs whose columns have mean 0 and deviation 1 where `by` has the modality."""
    parts = []
    for place, part in enumerate(inputs.parts):
        mean, deviation = by.moments(place)
        parts.append((part - mean) / deviation * inputs.present[:, place, None])
    return inputs._replace(parts=tuple(parts))
