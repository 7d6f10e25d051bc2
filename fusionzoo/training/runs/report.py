"""Report a run: data summary, learning-rate groups, metrics.json, final table, model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusionzoo.console import command_line
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.summary import data_summary
from fusionzoo.distributed.fsdp import sharded, whole_state
from fusionzoo.distributed.process_group import gather
from fusionzoo.errors import FusionZooError
from fusionzoo.plugins import plugin_list

from ..optim.param_groups import Group, describe, group_rows
from ..tasks.multitask import Tasks
from ..tasks.single import Nothing
from ..trainer import Stepper
from .checkpoint import State
from .tracker import Tracker, environment


def show_data(dataset: PairedDataset, tracker: Tracker) -> None:
    """Print the data summary."""
    if tracker.world.main:
        for line in data_summary(dataset):
            tracker.say(line)


def save_model(folder: Path, learn: Stepper) -> None:
    """Write the model folder; called by all processes, for they may share the weights."""
    model = learn.plain.model
    for one in learn.plain.balance.values():
        if one.aligns:
            model.set_align(one.project)  # type: ignore[arg-type]
    if len(learn.plain.heads.heads):
        model.set_heads(learn.plain.heads)
    weights = whole_state(model) if sharded(learn.plain) else None
    if learn.world.main:
        model.save(folder / "model", weights)


def out_of_memory(learn: Stepper) -> FusionZooError:
    """Say what to make smaller: the batch, or the largest encoder."""
    sizes = {n: sum(p.numel() for p in own) for n, own in learn.encoders.items()}
    name = max(sizes, key=sizes.__getitem__)
    return FusionZooError(
        f"{learn.world.device} is out of memory: --train.batch_size is {learn.cfg.train.batch_size}"
        f" (a smaller one with --train.accumulate learns the same), the largest encoder is {name}"
        f" with {sizes[name]:,} parameters; --train.checkpointing and --train.amp bf16 save memory"
    )


def show_groups(folder: Path, groups: list[Group], learn: Stepper, tracker: Tracker) -> None:
    """Print the table of learning-rate groups, and write it to groups.json."""
    about = describe(groups, learn.plain.model, learn.cfg.optim, learn.unfreezing)
    tracker.table("Learning-rate groups", *group_rows(about))
    if tracker.world.main:
        (folder / "groups.json").write_text(json.dumps(about, indent=2) + "\n")


def shows_each_alone(learn: Stepper) -> bool:
    """Whether the test split is also answered given each modality only."""
    return len(learn.plain.model.encoders) > 1 and learn.plain.tasks.leading != Nothing.leading


def report(
    folder: Path, learn: Stepper, state: State, test: dict[str, Any], tracker: Tracker
) -> None:
    """Write metrics.json, and print what each modality and the fusion reach."""
    cfg = learn.cfg
    alone, given_only = test.pop("unimodal"), test.pop("given_only", {})
    seconds = {part: round(time, 2) for part, time in tracker.seconds.items()}
    if tracker.world.main:
        results = {
            "train": {"loss": state.best["train_loss"]},
            "val": {name: state.best[name] for name in test if name in state.best},
            "test": test,
            "unimodal": alone,
            "given_only": given_only,
            "best_epoch": state.best["epoch"],
            "throughput": {
                "samples_per_second": learn.rows / tracker.busy if tracker.busy else None,
                "seconds": seconds,
            },
            "environment": environment(tracker.world),
        }
        (folder / "metrics.json").write_text(json.dumps(results, indent=2) + "\n")
    tracker.table(
        f"Test split, best epoch {state.best['epoch']} by validation",
        *comparison(learn.plain.tasks, cfg.fusion["name"], test, alone, given_only),
    )
    short = falls_short(learn.plain.tasks, alone, given_only)
    if short and "modality_dropout" not in cfg.balance:
        tracker.say(
            f"Given {' or '.join(short)} only, the fusion falls far short of that modality's own"
            " head: --balance modality_dropout trains it for missing modalities"
        )
    data = cfg.data["name"]
    tracker.say(f"model   {folder / 'model'}   (fusionzoo.load reads it)")
    plugins = ",".join(plugin_list(cfg.plugins))
    flags = f"--model {folder} --out {data}.parquet" + f" --plugins {plugins}" * bool(plugins)
    tracker.say(f"next    {command_line('embed')} {flags}")
    if cfg.log == "tensorboard":
        tracker.say(f"        tensorboard --logdir {folder / 'tensorboard'}")


def report_failures(dataset: PairedDataset, tracker: Tracker) -> None:
    """Say how many files could not be read, on any process; nothing goes missing in silence."""
    failed = {one for shard in gather(dataset.failures(), tracker.world) for one in shard}
    if failed:
        some = ", ".join(f"{key} ({modality})" for key, modality in sorted(failed)[:5])
        tracker.say(f"warning: {len(failed)} values could not be decoded: {some} ...")


def comparison(
    tasks: Tasks,
    fusion: str,
    test: dict[str, Any],
    alone: dict[str, dict[str, Any]],
    given_only: dict[str, dict[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the final table: each modality's own head, the fusion given each
    modality only, the fusion given all, its gain."""
    shown = [(name, title) for name, title in tasks.shown if name in test]
    lines = {f"{name} alone": figures for name, figures in alone.items()}
    lines |= {f"fusion given {name} only": figures for name, figures in given_only.items()}
    lines |= {f"fusion: {fusion}": test}
    rows = [(line, *(f"{own[name]:.3f}" for name, _ in shown)) for line, own in lines.items()]
    if len(alone) > 1:
        best = max(alone, key=lambda name: tasks.leads(alone[name]))
        gains = [tasks.gain(name, test, alone[best]) for name, _ in shown]
        rows.append((f"gain over {best} alone", *gains))
    return ("", *(title for _, title in shown)), rows


def falls_short(tasks: Tasks, alone: Mapping[str, Any], given_only: Mapping[str, Any]) -> list[str]:
    """Name the modalities given which alone the fusion is more than 10 points worse than that
    modality's own head; of an error, more than a tenth worse."""
    short = []
    for name in alone.keys() & given_only.keys():
        own, fused = (tasks.leads(figures[name]) for figures in (alone, given_only))
        if own - fused > (0.1 if tasks.higher else 0.1 * abs(own)):
            short.append(name)
    return [name for name in alone if name in short]
