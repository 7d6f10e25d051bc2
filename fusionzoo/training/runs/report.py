"""Report a run: data summary, learning-rate groups, metrics.json, final table, model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.console import command_line
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.summary import data_summary
from fusionzoo.distributed.fsdp import full_state_dict, sharded
from fusionzoo.distributed.process_group import gather
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json
from fusionzoo.plugins import plugin_list
from fusionzoo.trained_on import TrainedOn

from ..optim.param_groups import describe, group_rows
from ..tasks.multitask import Tasks
from ..tasks.no_target import NoTarget
from ..trainer import Trainer
from .checkpoint import State
from .tracker import Tracker, environment


def show_data(dataset: PairedDataset, dropped: Sequence[str], tracker: Tracker) -> None:
    """Print the data summary, and settings dropped with the modalities that they belong to."""
    if tracker.world.main:
        tracker.say(*data_summary(dataset))
    if dropped:
        tracker.say(f"unused settings, left out by --data.modalities: {', '.join(dropped)}")


def show_groups(folder: Path, trainer: Trainer, tracker: Tracker) -> None:
    """Print the table of learning-rate groups, and write it to groups.json."""
    unfreezing = trainer.freeze_plan.unfreezing
    groups = trainer.optimizer.param_groups
    described = describe(groups, trainer.module.model, trainer.cfg.optim, unfreezing)
    tracker.table("Learning-rate groups", *group_rows(described))
    if tracker.world.main:
        write_json(folder / "groups.json", described)


def save_model(folder: Path, trainer: Trainer, splits: Mapping[str, PairedDataset]) -> None:
    """Write the model folder; called by all processes, for they may share the weights."""
    module, model = trainer.module, trainer.module.model
    prefixes: set[int] = set()
    for strategy in module.balance.values():
        prefixes |= {*getattr(strategy, "prefixes", ())}
        if strategy.aligns:
            model.set_align(strategy.project)  # type: ignore[arg-type]
    if prefixes:
        model.spec["matryoshka"] = sorted(prefixes)
    if len(module.heads.heads):
        model.set_heads(module.heads)
    weights = full_state_dict(model) if sharded(module) else None
    if trainer.world.main:
        model.trained_on = TrainedOn.of(trainer.cfg.data, splits)
        model.save(folder / "model", weights)


def out_of_memory(trainer: Trainer) -> FusionZooError:
    """Say what to make smaller: the batch, or the largest encoder."""
    sizes = {name: sum(p.numel() for p in ps) for name, ps in trainer.encoders.items()}
    largest = max(sizes, key=sizes.__getitem__)
    return FusionZooError(
        f"{trainer.world.device} is out of memory: --train.batch_size is"
        f" {trainer.cfg.train.batch_size} (a smaller one with --train.accumulate learns the same),"
        f" the largest encoder is {largest} with {sizes[largest]:,} parameters;"
        " --train.checkpointing and --train.amp bf16 save memory"
    )


def reports_each_alone(trainer: Trainer) -> bool:
    """Whether the test split is also evaluated given each modality only."""
    module = trainer.module
    return len(module.model.encoders) > 1 and module.tasks.leading != NoTarget.leading


def report_results(
    folder: Path, trainer: Trainer, state: State, test: Mapping[str, Any], tracker: Tracker
) -> None:
    """Write metrics.json, and print the final table and what to run next."""
    results = write_results(folder, trainer, state, test, tracker)
    show_results(folder, trainer, results, tracker)


def write_results(
    folder: Path, trainer: Trainer, state: State, test: Mapping[str, Any], tracker: Tracker
) -> dict[str, Any]:
    """Write metrics.json (on the main process), and return what it holds."""
    tasks = trainer.module.tasks
    groups = ("unimodal", "given_only", "where_present")
    shared = {name: x for name, x in test.items() if name not in groups}
    results = {
        "train": {"loss": state.best["train_loss"]},
        "val": {name: state.best[name] for name in shared if name in state.best},
        "test": shared,
        "unimodal": test["unimodal"],
        "given_only": test.get("given_only", {}),
        "where_present": test.get("where_present", {}),
        "best_epoch": state.best["epoch"],
        **({"soup": state.best["soup"]} if "soup" in state.best else {}),
        "throughput": {
            "samples_per_second": trainer.rows / tracker.busy if tracker.busy else None,
            "seconds": {part: round(time, 2) for part, time in tracker.seconds.items()},
        },
        "environment": environment(tracker.world),
    }
    header, rows = result_rows(tasks, trainer.cfg.fusion["name"], results)
    names = [name for name, _ in tasks.shown if name in shared]
    results["table"] = {"header": header, "rows": rows, "metrics": names}
    if tracker.world.main:
        write_json(folder / "metrics.json", results)
    return results


def show_results(
    folder: Path, trainer: Trainer, results: Mapping[str, Any], tracker: Tracker
) -> None:
    """Print what each modality and the fusion reach, where the model is, and what to run next."""
    cfg, tasks = trainer.cfg, trainer.module.tasks
    tracker.table(
        f"Test split, best epoch {results['best_epoch']} by validation",
        results["table"]["header"],
        results["table"]["rows"],
    )
    heads = {name: x["unimodal"] for name, x in results["where_present"].items() if x["unimodal"]}
    short = falls_short(tasks, heads, results["given_only"])
    if short and "modality_dropout" not in cfg.balance:
        tracker.say(
            f"Given {' or '.join(short)} only, the fusion falls far short of that modality's own"
            " head: --balance modality_dropout trains it for missing modalities"
        )
    tracker.say(f"model   {folder / 'model'}   (fusionzoo.load reads it)")
    plugins = ",".join(plugin_list(cfg.plugins))
    flags = f"--model {folder} --out {cfg.data['name']}.parquet"
    flags += f" --plugins {plugins}" if plugins else ""
    tracker.say(f"next    {command_line('embed')} {flags}")
    if cfg.log == "tensorboard":
        tracker.say(f"        tensorboard --logdir {folder / 'tensorboard'}")


def report_failures(dataset: PairedDataset, tracker: Tracker) -> None:
    """Warn of files that could not be read, on any process."""
    shards = gather(dataset.failures(), tracker.world)
    failed = {failure for shard in shards for failure in shard}
    if failed:
        some = ", ".join(f"{key} ({modality})" for key, modality in sorted(failed)[:5])
        tracker.say(f"warning: {len(failed)} values could not be decoded: {some} ...")


def result_rows(
    tasks: Tasks, fusion: str, results: Mapping[str, Any]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the final table: each modality's own head, the fusion given each
    modality only, the fusion given all, its gain.

    What some samples lack is measured among those that have it, and the line says how many."""
    test, unimodal = results["test"], results["unimodal"]
    shown = [(name, title) for name, title in tasks.shown if name in test]
    lines = {f"{name} alone": metrics for name, metrics in unimodal.items()}
    for name, metrics in results["given_only"].items():
        present = results["where_present"][name]
        among = ""
        if present["samples"] < present["of"]:
            among = f", {present['samples']:,} with it"
            if present["unimodal"]:
                lines[f"{name} alone{among}"] = present["unimodal"]
        lines[f"fusion given {name} only{among}"] = metrics
    lines |= {f"fusion: {fusion}": test}
    rows = [
        (line, *(f"{metrics[name]:.3f}" for name, _ in shown)) for line, metrics in lines.items()
    ]
    if len(unimodal) > 1:
        best = max(unimodal, key=lambda name: tasks.leading_value(unimodal[name]))
        gains = [tasks.gain(name, test, unimodal[best]) for name, _ in shown]
        rows.append((f"gain over {best} alone", *gains))
    return ("", *(title for _, title in shown)), rows


def falls_short(
    tasks: Tasks, unimodal: Mapping[str, Any], given_only: Mapping[str, Any]
) -> list[str]:
    """Name the modalities given which alone the fusion is more than 10 points worse than that
    modality's own head on the same samples; of an error, more than a tenth worse."""
    short = []
    for name in unimodal:
        if name not in given_only:
            continue
        head, fusion = (tasks.leading_value(m[name]) for m in (unimodal, given_only))
        if head - fusion > (0.1 if tasks.higher else 0.1 * abs(head)):
            short.append(name)
    return short
