"""Build what a run trains: open the data, choose encoders, build model, heads and losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fusionzoo.config import RunConfig, merge
from fusionzoo.config.flags import Tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.tables.tabular import learn_columns
from fusionzoo.encoders import ENCODERS, entry_of
from fusionzoo.encoders.at_hand import replace_missing
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.encoders.base import unread_parameters
from fusionzoo.errors import FusionZooError, check_known
from fusionzoo.evaluation.retrieval import any_pair
from fusionzoo.fusion import FUSIONS
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import UnimodalHeads, create_model

from .balance import StrategyInputs, build_balance
from .balance.matryoshka import with_matryoshka
from .multitask import Tasks, build_tasks
from .objective import Objective, freeze_unused

SINGLE_PROCESS = World()


def encoders_at_hand(
    dataset: PairedDataset, settings: dict[str, Tree]
) -> tuple[dict[str, Tree], list[str]]:
    """Return the user's encoder settings, with others for defaults that lack weights; and notes."""
    defaults = {
        name: encoder
        for name, encoder in dataset.default_encoders.items()
        if not settings.get(name)
    }
    others, notes = replace_missing(defaults, dataset.modalities)
    return {**settings, **others}, notes


def choose_encoders(dataset: PairedDataset, settings: dict[str, Tree]) -> dict[str, Tree]:
    """Merge the user's encoder settings over the data set's defaults."""
    defaults = dataset.default_encoders
    encoders = merge(defaults, settings)
    for modality, encoder in encoders.items():
        entry = entry_of(str(encoder.get("name")), dataset.modalities.get(modality))
        parameters = {} if entry is None else entry.parameters
        # The width of input vectors follows from the data, whichever encoder reads them.
        if "in_dim" in parameters and "in_dim" in defaults.get(modality, {}):
            encoder.setdefault("in_dim", defaults[modality]["in_dim"])
        if "columns" in parameters and "columns" in defaults.get(modality, {}):
            bins, default = _num_bins(encoder), defaults[modality]
            if "columns" not in (settings.get(modality) or {}) and bins != default.get("bins", 0):
                encoder["columns"] = learn_columns(dataset, modality, bins)
            encoder.setdefault("columns", default["columns"])
    return encoders


def _num_bins(encoder: Tree) -> int:
    """Return the bins of a column that a tabular encoder codes piecewise, 0 if it does not."""
    parameters = ENCODERS[str(encoder["name"])].parameters
    if not {"numbers", "bins"} <= parameters.keys():
        return 0
    if encoder.get("numbers", parameters["numbers"].default) != "piecewise":
        return 0
    bins = encoder.get("bins", parameters["bins"].default)
    return bins if isinstance(bins, int) else 0  # the encoder refuses other types


def with_linear_skip(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """Give a new run's fusion its `linear_skip`, if it has one by default; return also what to say.

    A run that goes on keeps the settings that it began with.
    """
    goes_on = cfg.resume and cfg.out is not None and (Path(cfg.out) / "config.yaml").is_file()
    name = cfg.fusion["name"]
    settings = FUSIONS[name].to_train(cfg.fusion)
    if goes_on or settings == cfg.fusion:
        return cfg, []
    note = f"fusion {name}: trained with linear_skip (--fusion.linear_skip false: as in its paper)"
    return replace(cfg, fusion=settings), [note]


def build_objective(
    cfg: RunConfig, train_set: PairedDataset, world: World = SINGLE_PROCESS
) -> tuple[Objective, list[str]]:
    """Build model, heads, losses and strategies; also return the parameters frozen as unused."""
    _check_modalities(cfg, train_set)
    tasks = build_tasks(cfg, train_set)
    mean_weight = mean_weight_of(train_set, tasks)
    encoders = {name: cfg.encoders[name] for name in train_set.modalities}
    model = create_model(
        cfg.fusion,
        encoders,
        classes=train_set.classes,
        targets=train_set.scheme,
        kinds=train_set.modalities,
    )
    notes = set_augmentation(model.named_encoders(), cfg.data.get("augment"))
    for name, encoder in model.named_encoders():
        if name in cfg.optim.layer_decay or name in cfg.optim.gradual_unfreeze:
            encoder.unread = unread_parameters(encoder)
    tasks.check_loss_of(cfg.fusion["name"], model.fusion.ignores)
    dims = {name: encoder.dim for name, encoder in model.named_encoders()}
    with_heads = cfg.train.unimodal and train_set.scheme != ()
    ids, targets = train_set.ids, train_set.targets
    prior = tasks.prior(targets, train_set.weights)
    heads = UnimodalHeads(dims if with_heads else {}, model.spec["fusion"]["dim"], prior)
    if train_set.scheme != ():
        model.complete(prior=prior)
    objective = Objective(
        model, heads, tasks, ids, targets, train_set.groups, cfg.seed, mean_weight
    )
    objective.notes = notes
    unused = freeze_unused(objective)
    # After `freeze_unused`, so that no strategy keeps state from its dummy batch.
    inputs = StrategyInputs(model, targets, cfg.seed, world)
    objective.balance = build_balance(*with_matryoshka(cfg, model.targets != []), inputs)
    _check_strategies(cfg, objective, train_set)
    return objective, unused


def mean_weight_of(train_set: PairedDataset, tasks: Tasks) -> float | None:
    """Return the mean weight of the training samples, None if they have none; raise an error where
    all are 0, or where a metric takes no weights."""
    if train_set.weights is None:
        return None
    tasks.check_weights()
    mean = float(train_set.weights.double().mean())
    if not mean > 0:
        raise FusionZooError(
            f"{train_set.source}: all weights of the training split are 0 in column"
            f" {train_set.weight_column!r} (--data.weight_column), so nothing could be learnt"
        )
    return mean


def _check_modalities(cfg: RunConfig, train_set: PairedDataset) -> None:
    for modality in cfg.encoders:
        problem = f"--encoders.{modality}: the data has no modality {modality!r}"
        check_known(modality, train_set.modalities, problem)
    if train_set.scheme is None and not train_set.classes:
        raise FusionZooError("the data has no target column, and training needs one")


def _check_strategies(cfg: RunConfig, objective: Objective, train_set: PairedDataset) -> None:
    """Raise on strategies that do not work with the wrapper, and on a run without any loss."""
    strategies = objective.balance
    if strategies and cfg.dist.strategy == "dp":
        raise FusionZooError("--balance: strategies remember what dp's threads forget: use ddp")
    if train_set.scheme == ():
        if not any(strategy.aligns for strategy in strategies.values()):
            raise FusionZooError(
                "--objective.name none learns nothing: add --balance contrastive_align"
            )
        if "plateau" in (cfg.optim.schedule, *cfg.optim.modality_schedule.values()):
            raise FusionZooError(
                "--optim.schedule plateau follows a validation loss, which --objective.name none"
                " lacks"
            )
    if train_set.weights is not None:
        check_weighable(objective)
    for name, strategy in strategies.items():
        if cfg.dist.strategy == "fsdp" and not strategy.shards:
            raise FusionZooError(f"--balance {name} needs whole weights: --dist.strategy ddp")


def check_weighable(objective: Objective) -> None:
    """Raise on training strategies that cannot weigh rows."""
    for name, strategy in objective.balance.items():
        if not strategy.weighs_rows:
            raise FusionZooError(
                f"--balance {name} compares samples with each other, so it cannot weigh single"
                " ones: leave it out, or leave out --data.weight_column"
            )


def splits_of(cfg: RunConfig, dataset: PairedDataset) -> dict[str, PairedDataset]:
    """Return the splits of a run: train, val and test, or train and test with `--train.select last`
    where there is no validation split."""
    unvalidated = cfg.train.select == "last" and "val" not in dataset.splits
    names = ("train", "test") if unvalidated else ("train", "val", "test")
    return {name: dataset.split(name) for name in names}


def check_splits(tasks: Tasks, splits: Mapping[str, PairedDataset]) -> None:
    """Raise, before training, if a split cannot be evaluated."""
    for name, split in splits.items():
        if name == "train":
            continue
        if not tasks.has_target and not any_pair(split.present):
            raise FusionZooError(
                f"no sample of the {name} split has two modalities, so retrieval cannot be judged"
            )
        targets, weights = split.targets, split.weights
        if weights is not None and not (weights > 0).all():
            if not (weights > 0).any():
                raise FusionZooError(
                    f"all weights of the {name} split are 0 in column {split.weight_column!r}"
                    " (--data.weight_column), so it cannot be evaluated"
                )
            targets = targets[weights > 0]
        for target in tasks.unlabelled(targets):
            raise FusionZooError(f"no sample of the {name} split has a label {target!r}")
