"""`--speed auto` of a benchmark: the number of loader processes, before anything is encoded."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.distributed.process_group import World
from fusionzoo.eval_mode import quiet
from fusionzoo.files import write_json
from fusionzoo.present_rows import encode_rows
from fusionzoo.structures import Batch
from fusionzoo.training.runs.speed.choose import Settings, Timing, choose, describe
from fusionzoo.training.runs.speed.inference import spread
from fusionzoo.training.runs.speed.measure import measure_loading, same_randomness, worker_options

from ..bench import Bench
from .encoders import Encoders
from .feeds import device_of, loader_workers

BATCH = 64  # samples that are encoded at once


def choose_workers(bench: Bench, dataset: PairedDataset, encoders: Encoders) -> Bench:
    """Return the bench with the number of loader processes that encodes fastest.

    On a CPU encoders are in channels-last format anyway; bf16 would change features, which
    `--precision` decides. So nothing that is compared changes, and stored trials stay valid.
    """
    cfg, device = bench.cfg, device_of(bench.cfg)
    if cfg.speed == "off":
        return bench
    defaults: Settings = {"num_workers": loader_workers(cfg)}
    collate = Collate({name: encoder.processor(False) for name, encoder in encoders.items()})
    keys = spread(dataset.by_length(), BATCH)
    copies = {name: copy.deepcopy(encoder).to(device) for name, encoder in encoders.items()}

    @torch.no_grad()
    def work(batch: Batch) -> None:
        for column, (name, encoder) in enumerate(copies.items()):
            with quiet(encoder):
                encode_rows(encoder, batch.inputs[name], batch.present[:, column])

    def measured(settings: Settings) -> Timing:
        return measure_loading(dataset, collate, keys, settings["num_workers"], work, device)

    passes = cfg.epochs * cfg.seeds * len(bench.folds) if cfg.mode == "finetune" else cfg.views
    options = worker_options(cfg.num_workers, defaults["num_workers"], World())
    with same_randomness(device):
        choice = choose(defaults, options, measured, samples=passes * len(dataset))
    path = Path(cfg.out) / "speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, choice.record)
    note = describe(choice, defaults, path.name)
    print(note)
    cfg = replace(cfg, num_workers=choice.settings["num_workers"])
    return replace(bench, cfg=cfg, notes=(*bench.notes, note))
