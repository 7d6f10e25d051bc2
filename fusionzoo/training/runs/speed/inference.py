"""`--speed auto` of embedding, evaluation and prediction."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusionzoo.config.schema import ModelUse
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World, from_main
from fusionzoo.files import write_json
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features

from ...data import num_workers
from ...optim.precision import AMP_DTYPES
from .choose import Choice, Option, Settings, Timing, choose, describe
from .measure import (
    DISTINCT,
    Keys,
    format_options,
    measure_loading,
    same_randomness,
    set_memory_format,
    worker_options,
)

COMPILING = 30.0  # seconds to expect of torch.compile: not tried in shorter work


class Speed(NamedTuple):
    """How a model is run over data."""

    batch_size: int
    num_workers: int | None
    amp: torch.dtype | None = None
    notes: Sequence[str] = ()

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context; disabled in full precision."""
        return torch.autocast(device.type, dtype=self.amp, enabled=self.amp is not None)


def choose_for_inference(
    cfg: ModelUse,
    model: FusionModel,
    dataset: PairedDataset,
    out: str,
    world: World | None = None,
    *,
    stored: bool = False,
) -> Speed:
    """Return how to run a model over a data set, and set its memory format and compilation.

    With `--speed auto` the main process measures, and the choice is written to `<out>.speed.json`,
    if `out` is not empty; `stored` takes the choice that is written there, where there is one. A
    batch size or number of workers that the user set stays.
    """
    world = World() if world is None else world
    if cfg.speed == "off":
        return Speed(cfg.batch_size, cfg.num_workers)
    defaults: Settings = {
        "batch_size": cfg.batch_size,
        "channels_last": False,
        "amp": "none",
        "compile": False,
        "num_workers": num_workers(cfg.num_workers, world),
    }
    path = Path(f"{out}.speed.json")
    record = None
    if world.main and stored and path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
    elif world.main:
        record = measure(cfg, model, dataset, defaults, world).record
    choice = Choice.from_record(from_main(record, world))
    where = path.name if out else "above"
    if out and world.main:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, choice.record)
    notes = [describe(choice, defaults, where)]
    settings = choice.settings
    if settings["amp"] != "none":
        notes.append(
            "bf16: outputs are computed in bfloat16 (about 3 digits); --speed off computes them in"
            " float32"
        )
    prepare(model, settings)
    amp = AMP_DTYPES[settings["amp"]]
    return Speed(settings["batch_size"], settings["num_workers"], amp, notes)


def prepare(model: FusionModel, settings: Settings) -> None:
    """Set the memory format, and compile encoders and fusion, in place."""
    if settings["channels_last"]:
        set_memory_format(model, channels_last=True)
    if settings["compile"]:
        for _, encoder in model.named_encoders():
            encoder.compile()
        model.fusion.compile()


def options_for(cfg: ModelUse, model: FusionModel, workers: int, world: World) -> list[Option]:
    """Return what to try: batch sizes only where the user set none."""
    sizes = [Option("batch_size", (128, 256)), Option("batch_size", (32, 16))]
    return [
        *worker_options(cfg.num_workers, workers, world),
        *format_options(model, channels_last=False, bf16=False),
        *(sizes if cfg.batch_size == ModelUse.batch_size else []),
        Option("compile", (True,), takes=COMPILING),
    ]


def measure(
    cfg: ModelUse, model: FusionModel, dataset: PairedDataset, defaults: Settings, world: World
) -> Choice:
    """Time loading and forward passes over samples of all lengths, on copies of the model."""
    device, collate = model.device, model.collate()
    ordered = dataset.by_length()
    options = options_for(cfg, model, defaults["num_workers"], world)

    @torch.no_grad()
    def measured(settings: Settings) -> Timing:
        trial = copy.deepcopy(model).eval()
        prepare(trial, settings)
        speed = Speed(settings["batch_size"], None, AMP_DTYPES[settings["amp"]])

        def work(batch: Batch) -> None:
            with speed.autocast(device):
                trial(batch)

        keys = spread(ordered, settings["batch_size"])
        longest: Any = collate([dataset[row] for row in ordered[: settings["batch_size"]]])
        work(longest.to(device))  # runs out of memory here, if it does
        return measure_loading(dataset, collate, keys, settings["num_workers"], work, device)

    with same_randomness(device):
        return choose(defaults, options, measured, samples=-(-len(dataset) // world.size))


def spread(ordered: Sequence[int], batch_size: int) -> list[Keys]:
    """Return batches of samples of similar lengths, spread evenly over all lengths."""
    number = min(DISTINCT, max(1, len(ordered) // batch_size))
    starts = torch.linspace(0, max(0, len(ordered) - batch_size), number).long().tolist()
    return [[(row, 0) for row in ordered[start : start + batch_size]] for start in starts]


def as_float32(features: Features) -> Features:
    """Return features of half precision in single precision, others as they are."""
    if features.pooled.dtype not in (torch.float16, torch.bfloat16):
        return features
    return Features(features.tokens.float(), features.mask, features.pooled.float())
