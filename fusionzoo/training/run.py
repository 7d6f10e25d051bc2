"""The outside of training: open the data, build what is trained, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusionzoo._flags import Tree
from fusionzoo.config import RunConfig, merge, split_name
from fusionzoo.console import command_line
from fusionzoo.datasets import DATASETS, PairedDataset, create_dataset
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.evaluation.retrieval import any_pair
from fusionzoo.model import create_model
from fusionzoo.plugins import plugin_list
from fusionzoo.unimodal import UnimodalHeads

from .balance import Setting, build_balance
from .checkpoint import State
from .distributed import World, gather
from .groups import Group, describe, group_rows
from .joint import Tasks, build_tasks
from .objectives import Objective, freeze_unused
from .sharding import sharded, whole_state
from .step import Stepper
from .tasks import Nothing
from .tracking import Tracker, environment

ALONE = World()


def open_dataset(
    settings: dict[str, Any], targets: Mapping[str, str] | None = None
) -> PairedDataset:
    """Open the data set that `--data.name` and its settings describe, to read these targets."""
    name, rest = split_name(settings, "data")
    if targets is None:
        return create_dataset(name, **rest)
    if "targets" in DATASETS[name].parameters:
        return create_dataset(name, **{**rest, "targets": targets})
    return create_dataset(name, **rest).with_targets(targets)


def show_data(dataset: PairedDataset, tracker: Tracker) -> None:
    """Print the data summary."""
    if tracker.world.main:
        for line in data_summary(dataset):
            tracker.say(line)


def choose_encoders(dataset: PairedDataset, chosen: dict[str, Tree]) -> dict[str, Tree]:
    """Lay what the user says of encoders on the data set's own choice."""
    own = dataset.default_encoders
    encoders = merge(own, chosen)
    for name, encoder in encoders.items():
        # The width of given vectors is a fact of the data, whichever encoder reads them.
        if "in_dim" in own.get(name, {}) and str(encoder.get("name")).startswith(
            ("vector/", "seq")
        ):
            encoder.setdefault("in_dim", own[name]["in_dim"])
    return encoders


def build_objective(
    cfg: RunConfig, train_set: PairedDataset, world: World = ALONE
) -> tuple[Objective, list[str]]:
    """Build model, heads and loss for the data; also return what no loss reads, now frozen."""
    for modality in cfg.encoders:
        if modality not in train_set.modalities:
            raise FusionZooError(
                f"--encoders.{modality}: the data has no modality {modality!r}."
                f"{did_you_mean(modality, train_set.modalities)}"
                f" It has: {', '.join(train_set.modalities)}."
            )
    if train_set.scheme is None and not train_set.classes:
        raise FusionZooError("the data has no target column, and training needs one")
    tasks = build_tasks(cfg, train_set)
    encoders = {name: cfg.encoders[name] for name in train_set.modalities}
    kinds = train_set.modalities
    model = create_model(
        cfg.fusion, encoders, classes=train_set.classes, targets=train_set.scheme, kinds=kinds
    )
    tasks.check_loss_of(cfg.fusion["name"], model.fusion.ignores)
    dims = {name: encoder.dim for name, encoder in model.named_encoders()}
    dim = model.spec["fusion"]["dim"]
    compare = cfg.train.unimodal and train_set.scheme != ()
    ids, targets = train_set.ids, train_set.targets
    heads = UnimodalHeads(dims if compare else {}, dim, tasks.prior(targets))
    objective = Objective(model, heads, tasks, ids, targets, train_set.groups, cfg.seed)
    unused = freeze_unused(objective)
    if cfg.balance and cfg.dist.strategy == "dp":
        raise FusionZooError("--balance: strategies remember what dp's threads forget: use ddp")
    # After the blank batch above: of that a strategy must remember nothing.
    setting = Setting(model, targets, cfg.seed, world)
    objective.balance = build_balance(cfg.balance, cfg.balance_settings, setting)
    if train_set.scheme == () and not any(one.aligns for one in objective.balance.values()):
        raise FusionZooError(
            "--objective.name none learns nothing: add --balance contrastive_align"
        )
    if train_set.scheme == () and "plateau" in (
        cfg.optim.schedule,
        *cfg.optim.modality_schedule.values(),
    ):
        raise FusionZooError(
            "--optim.schedule plateau follows a validation loss, which --objective.name none lacks"
        )
    for name, one in objective.balance.items():
        if cfg.dist.strategy == "fsdp" and not one.shards:
            raise FusionZooError(f"--balance {name} needs whole weights: --dist.strategy ddp")
    return objective, unused


def check_splits(tasks: Tasks, splits: Mapping[str, PairedDataset]) -> None:
    """Refuse, before training, a split that cannot be judged."""
    for name in ("val", "test"):
        part = splits[name]
        if tasks.leading == Nothing.leading and not any_pair(part.present):
            raise FusionZooError(
                f"no sample of the {name} split has two modalities, so retrieval cannot be judged"
            )
        for target in tasks.unlabelled(part.targets):
            raise FusionZooError(f"no sample of the {name} split has a label {target!r}")


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
