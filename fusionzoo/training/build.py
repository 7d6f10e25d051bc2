"""Build what a run trains: open the data, choose encoders, build model, heads and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionzoo.config import RunConfig, merge, split_name
from fusionzoo.config.flags import Tree
from fusionzoo.datasets import DATASETS, PairedDataset, create_dataset
from fusionzoo.distributed.process_group import World
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.evaluation.retrieval import any_pair
from fusionzoo.model import create_model
from fusionzoo.unimodal import UnimodalHeads

from .balance import Setting, build_balance
from .objective import Objective, freeze_unused
from .tasks.multitask import Tasks, build_tasks
from .tasks.single import Nothing

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
