"""Settings of a run, an embedding job and a benchmark: typed dataclasses with their help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Interval

from .flags import Tree

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]
Factor = Annotated[float, Interval(gt=0, le=1)]
Schedule = Literal["cosine", "linear", "step", "plateau", "constant", "onecycle"]


def option(default: Any, says: str) -> Any:
    """A dataclass field with its line of help; dicts are copied for each instance."""
    metadata = {"help": says}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """A setting of each modality may also have the key `fusion`, but for the two of unfreezing."""

    name: str = option("adamw", "optimiser: any of torch.optim or timm.optim")
    settings: Tree = option({}, "further arguments of the optimiser: --optim.settings.eps 1e-6")
    lr: Positive = option(1e-3, "learning rate of every group that has none of its own")
    modality_lr: dict[str, Positive] = option({}, "modality -> learning rate of its encoder")
    fusion_lr: Positive | None = option(None, "learning rate of the fusion")
    layer_decay: dict[str, Factor] = option({}, "modality -> factor of lr from a layer to the next")
    weight_decay: NotNegative = option(0.05, "decay; never on norms, biases and scalars")
    modality_weight_decay: dict[str, NotNegative] = option({}, "modality -> decay of its encoder")
    momentum: Share = option(0.9, "of sgd")
    betas: tuple[float, float] = option((0.9, 0.999), "of adam and adamw")
    schedule: Schedule = option("cosine", f"after the warm-up: {' | '.join(get_args(Schedule))}")
    modality_schedule: dict[str, Schedule] = option({}, "modality -> schedule of its encoder")
    warmup: Share = option(0.05, "share of all steps with a linearly rising rate")
    modality_warmup: dict[str, Share] = option({}, "modality -> warm-up of its encoder")
    gamma: Positive = option(0.1, "factor of each drop of the step and plateau schedules")
    step_epochs: Count = option(10, "epochs between the drops of the step schedule")
    plateau_epochs: Count = option(3, "epochs without a better validation loss before a drop")
    unfreeze_at_epoch: dict[str, Count] = option({}, "modality -> epochs that its encoder waits")
    gradual_unfreeze: dict[str, Count] = option(
        {}, "modality -> epochs between its layers, which learn from the last one down"
    )
    clip: Positive | None = option(1.0, "largest norm of the whole gradient; null = no clipping")


UNFREEZING = ("unfreeze_at_epoch", "gradual_unfreeze")
KEYED = (  # settings of each modality; the first ones also of the fusion
    *("modality_lr", "layer_decay", "modality_weight_decay", "modality_schedule"),
    *("modality_warmup", *UNFREEZING),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: Count = option(12, "passes over the training split")
    max_steps: Count | None = option(
        None, "optimiser steps at most, also within an epoch; the schedule ends there"
    )
    patience: Count | None = option(
        None, "epochs without a better validation metric before stopping; null = never"
    )
    batch_size: Count = option(32, "samples per process and step")
    accumulate: Count = option(1, "batches whose gradients are averaged before a step")
    eval_batch_size: Count | None = option(None, "null = batch_size")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes per rank; null = chosen by cores"
    )
    group_by: str | None = option(
        None, "batches of similar samples: length (less padding) | aspect_ratio | a column"
    )
    sampler: Literal["random", "class_weighted"] = option("random", "order of training samples")
    unimodal: bool = option(True, "train each modality's own head beside the fusion, to compare")
    amp: Literal["none", "bf16", "fp16"] = option("none", "mixed precision")
    log_every: Count = option(10, "steps between two lines of metrics.jsonl")
    save_every: Count | None = option(None, "steps between two checkpoints; null = every epoch")
    last_k: Count = option(2, "checkpoints kept; an older one stands in for a damaged one")
    ema: Share | None = option(None, "decay of the weights' moving average, which is then tested")
    max_bad_steps: Annotated[int, Ge(0)] = option(
        5, "steps in a row skipped for a loss or gradient that is not finite, before stopping"
    )
    compile: bool = option(False, "torch.compile encoders and fusion")
    channels_last: bool = option(False, "pictures and their encoders in channels-last memory")
    checkpointing: bool = option(False, "encoders recompute activations: less memory, more time")


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    strategy: Literal["ddp", "fsdp", "dp", "none"] = option(
        "ddp", "ddp is plain training on one process; fsdp shares out the weights"
    )
    nproc: Count = option(1, "processes that train.py starts itself on this machine")
    backend: Literal["auto", "nccl", "gloo", "mpi"] = option("auto", "nccl on GPUs, else gloo")
    init_method: str = option("env://", "env:// | tcp://host:port | file:///path")
    rank: int | None = option(None, "of this process, where the environment has no RANK")
    world_size: int | None = option(None, "where the environment has no WORLD_SIZE")
    timeout: Positive = option(600.0, "seconds a collective may take")
    sync_batchnorm: bool = option(False, "share batch statistics between processes")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run needs; stored as config.yaml beside its results."""

    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
    )
    data: Tree = option({"name": "digits"}, "data set and its settings: `fusionzoo data list`")
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's own choice")
    fusion: Tree = option({"name": "gmu"}, "fusion and its settings: `fusionzoo zoo`")
    balance: str | list[str] = option("", "training strategies, `ogm_ge,modality_dropout`")
    balance_settings: dict[str, Tree] = option({}, "training strategy -> settings of its own")
    objective: Tree = option({"name": "classification"}, "what is learnt: docs/objectives.md")
    targets: dict[str, Tree] = option({}, "column -> objective, for several; empty = `objective`")
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    log: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = option(
        "tensorboard", "where figures are shown; with torchrun: torchrun ... -- train.py --log ..."
    )
    seed: int = option(0, "of weights, order, dropout and augmentation")
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    out: str | None = option(None, "run folder; null = runs/<data set>, numbered when taken")
    overwrite: bool = option(False, "replace the run that the folder holds")
    resume: Literal[False, True, "auto"] = option(
        False,
        "continue the run in `out` from its last checkpoint; auto: if there is one, else start",
    )


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
    )
    model: str = option("", "model folder, or run folder with a model in it (required)")
    data: Tree = option({}, "data set and its settings; empty = the one of the run")
    split: str = option("all", "train | val | test | all")
    out: str = option("embeddings.parquet", "Parquet file; with N processes N files beside it")
    batch_size: Count = option(64, "samples per step")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes; null = chosen by cores"
    )
    device: str = option("auto", "auto | cpu | cuda")
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    model: str = option("", "model folder, or run folder with a model in it (required)")
    data: Tree = option({}, "data set and its settings (required): `fusionzoo data list`")
    split: str = option("test", "train | val | test | all")
    every_subset: bool = option(False, "also measure the fusion given each subset of modalities")
    out: str = option("", "JSON file for the metrics; empty = print them only")
    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
    )
    batch_size: Count = option(64, "samples per step")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes; null = chosen by cores"
    )
    device: str = option("auto", "auto | cpu | cuda")


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    model: str = option("", "model folder, or run folder with a model in it (required)")
    data: Tree = option({}, "data set and its settings (required): `fusionzoo data list`")
    split: str = option("all", "train | val | test | all")
    out: str = option("", "file for the predictions, .csv or .parquet")
    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
    )
    batch_size: Count = option(64, "samples per step")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes; null = chosen by cores"
    )
    device: str = option("auto", "auto | cpu | cuda")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Everything that a comparison of strategies needs; stored as config.yaml beside the report."""

    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
    )
    data: Tree = option({"name": "digits"}, "data set and its settings: `fusionzoo data list`")
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's own choice")
    fusions: str | list[str] = option("all", "names or families, `mbt,lmf,late`, or all")
    fusion: Tree = option({"dim": 128}, "settings of every fusion; what it does not have is left")
    settings: dict[str, Tree] = option({}, "fusion -> settings of its own")
    mode: Literal["probe", "finetune"] = option(
        "probe", "probe: encoders frozen, features cached; finetune: end to end"
    )
    seeds: Count = option(5, "training seeds of each strategy")
    folds: Annotated[int, Ge(0)] = option(0, "cross-validation; 0 = the data's own split")
    epochs: Count = option(20, "passes over the training split, at most")
    patience: Count | None = option(5, "epochs without a better validation loss; null = never stop")
    batch_size: Count = option(32, "samples per step")
    optim: OptimConfig = field(default_factory=OptimConfig)
    tune: Annotated[int, Ge(0)] = option(0, "Optuna trials of each strategy, on validation data")
    encoder_epochs: Count = option(10, "probe: passes to train an encoder that has no weights")
    max_tokens: dict[str, Count] = option({}, "modality -> tokens kept, neighbours averaged")
    precision: Literal["fp32", "bf16"] = option("fp32", "of cached features")
    standardise: bool = option(False, "probe: features of mean 0 and deviation 1 in training")
    views: Count = option(1, "probe: cached passes of the training split; from 2 on augmented")
    stack: bool = option(True, "train the seeds of a small strategy at once, where that is equal")
    controls: bool = option(True, "also train on shuffled labels, which must fall to chance")
    corruptions: bool = option(True, "also test on damaged samples, five severities")
    jobs: Count | None = option(None, "processes; null = one per core, one thread each")
    engine: Literal["processes", "ray"] = option("processes", "what runs the trials")
    num_workers: Annotated[int, Ge(0)] | None = option(None, "loader processes of encoding")
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    seed: int = option(0, "first training seed; also of encoders trained alone, folds and tuning")
    out: str = option("report", "folder of the report and of its trials")
    combine: tuple[str, ...] = option(
        (), "folders of finished reports: rank the strategies over them"
    )
