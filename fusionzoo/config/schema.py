"""Settings of every command: typed dataclasses with their help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from annotated_types import Ge, Gt, Interval

from .flags import Tree

TABLE_WORDS = (  # settings of one's own table that need no `data.`; those of a run have other names
    *("columns", "kinds", "shares", "paths", "allow_outside", "group", "group_column"),
    *("time_column", "val_share", "delimiter", "header", "encoding", "sheet", "decimal", "na"),
    *("weight_column", "drop_empty", "label_separator", "positive"),
    *("fields", "join", "on", "how", "arrays", "sample_rate"),
    *("frames", "on_error", "max_errors", "modalities", "missing", "missing_mechanism"),
    "base",
)
OBJECTIVE_WORDS = (  # settings of fusionzoo's objectives, which need no `objective.`
    *("class_weights", "label_smoothing", "gamma", "pos_weight", "loss", "delta"),
)
WORDS = {"data": TABLE_WORDS, "objective": OBJECTIVE_WORDS}  # component -> what needs no section
TARGET = "label column of one's own table, or several: a,b; what they hold is found out"
PLUGINS = "files or modules with components of your own, `my_fusion.py`: docs/plugins.md"
THRESHOLD = "of two classes: the positive one is answered from this probability on, 0.3"
THRESHOLDS = (
    "label, or `tags.sea`, -> probability above which it is answered; of others the learnt one, or"
    " 0.5"
)
HIDDEN = {"hidden": True}  # no setting: filled in while settings are read, and stored nowhere
Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(ge=0, lt=1)]
Factor = Annotated[float, Interval(gt=0, le=1)]
Between = Annotated[float, Interval(gt=0, lt=1)]
Schedule = Literal["cosine", "linear", "step", "plateau", "constant", "onecycle"]
UNFREEZING = ("unfreeze_at_epoch", "gradual_unfreeze")
KEYED = (  # settings by modality; all but those in UNFREEZING also of the fusion
    *("modality_lr", "layer_decay", "modality_weight_decay", "modality_schedule"),
    *("modality_warmup", *UNFREEZING),
)


def option(default: Any, help_line: str) -> Any:
    """A dataclass field with its line of help; a dict default is copied for each instance."""
    metadata = {"help": help_line}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Settings by modality also take the key `fusion`, except those in `UNFREEZING`."""

    name: str = option("adamw", "optimiser: any of torch.optim or timm.optim")
    settings: Tree = option({}, "further arguments of the optimiser: --optim.settings.eps 1e-6")
    lr: Positive = option(1e-3, "learning rate of all groups without a specific one")
    modality_lr: dict[str, Positive] = option(
        {}, "modality -> learning rate of its encoder; `fusion` -> that of the fusion"
    )
    layer_decay: dict[str, Factor] = option(
        {}, "modality -> factor of lr per layer, from the last down"
    )
    weight_decay: NotNegative = option(0.05, "weight decay; never on norms, biases and scalars")
    modality_weight_decay: dict[str, NotNegative] = option(
        {}, "modality -> weight decay of its encoder"
    )
    schedule: Schedule = option("cosine", f"after the warm-up: {' | '.join(get_args(Schedule))}")
    modality_schedule: dict[str, Schedule] = option({}, "modality -> schedule of its encoder")
    warmup: Share = option(0.05, "linear warm-up, as a share of all steps")
    modality_warmup: dict[str, Share] = option({}, "modality -> warm-up of its encoder")
    gamma: Positive = option(0.1, "step and plateau schedules: factor of each drop")
    step_epochs: Count | None = option(
        None,
        "epochs between drops of the step schedule (none = 10), or without a better val loss"
        " before one of plateau (none = 3)",
    )
    unfreeze_at_epoch: dict[str, Count] = option({}, "modality -> epochs its encoder stays frozen")
    gradual_unfreeze: dict[str, Count] = option(
        {}, "modality -> epochs between unfreezing layers, from the last one down"
    )
    clip: Positive | None = option(1.0, "maximum norm of the gradient; none = no clipping")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: Count = option(12, "passes over the training split")
    max_steps: Count | None = option(
        None, "maximum number of optimiser steps; the schedule ends there"
    )
    patience: Count | None = option(
        None, "epochs without a better validation metric before stopping; none = never"
    )
    select: Literal["best_val", "last"] = option(
        "best_val",
        "the epoch whose model is kept: best_val, the best by validation, or last, for which the"
        " data needs no validation split",
    )
    metric: str = option(
        "",
        "validation metric that chooses the best epoch, early stopping and trials: auroc, loss, or"
        " any in metrics.json; empty = that of the objective",
    )
    time_limit: str | Positive | None = option(
        None, "stop training after this time and evaluate: 90s, 10m, 1.5h; --resume goes on"
    )
    trials: Count = option(
        1,
        "train so many times and keep the best by validation: first with learning rates x 1, 1/3"
        " and 3, then with further seeds; the time limit is that of all",
    )
    seeds: Count = option(
        1,
        "train so many times from other seeds, and join them into one model that averages their"
        " answers; the time limit is that of all",
    )
    refit: bool = option(
        False,
        "train anew on train and validation together, for the epochs that were best, and save that"
        " model; validation figures stay those of the first training",
    )
    floors: bool = option(
        False,
        "also fit a linear model, and of a table boosted trees, on the same columns: rows of the"
        " final table that the fusion should beat",
    )
    average_linear: bool = option(
        False,
        "with `floors`, of one table, or frozen encoders and vectors: answer with the mean of model"
        " and linear model, unless validation speaks against it",
    )
    batch_size: Count = option(32, "samples per process and step")
    accumulate: Count = option(1, "batches accumulated per optimiser step")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes per rank; none = chosen by cores"
    )
    group_by: str | None = option(
        None, "group similar samples into batches: length (less padding) | aspect_ratio | a column"
    )
    sampler: Literal["random", "class_weighted"] = option("random", "order of training samples")
    unimodal: bool = option(True, "also train a classifier head per modality, for comparison")
    cache_frozen: Literal["auto", "on", "off"] = option(
        "auto", "run encoders that stay frozen once, and cache features; auto: where it is the same"
    )
    standardise: Literal["auto", "zscore", "minmax", "off"] = option(
        "auto",
        "centre and scale features of encoders that stay frozen, by the training split: auto, to"
        " one length for each modality; zscore, each feature to std 1; minmax, each to 0 to 1; off",
    )
    calibrate: Literal["none", "temperature", "auto"] = option(
        "auto", "of the finished model, on validation data; auto: where that lowers the NLL"
    )
    amp: Literal["none", "bf16", "fp16"] = option("none", "mixed precision")
    log_every: Count = option(10, "steps between two lines of metrics.jsonl")
    save_every: Count | None = option(
        None, "steps between two checkpoints; none = after epochs, in a 20th of the time"
    )
    ema: Share | None = option(None, "decay of an EMA of the weights, used in evaluation")
    max_bad_steps: Annotated[int, Ge(0)] = option(
        5, "stop after more consecutive steps with a non-finite loss or gradient"
    )
    compile: bool = option(False, "torch.compile encoders and fusion")
    channels_last: bool = option(False, "channels-last memory format for images and encoders")
    checkpointing: bool = option(False, "recompute the encoders' activations: slower, less memory")


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    strategy: Literal["ddp", "fsdp", "dp", "none"] = option(
        "ddp", "ddp (no wrapper on one process); fsdp shards the weights"
    )
    nproc: Count = option(1, "processes to start on this machine")
    backend: Literal["auto", "nccl", "gloo", "mpi"] = option("auto", "nccl on GPUs, else gloo")
    init_method: str = option("env://", "env:// | tcp://host:port | file:///path")
    rank: int | None = option(None, "rank of this process, if RANK is not set")
    world_size: int | None = option(None, "number of processes, if WORLD_SIZE is not set")
    timeout: Positive = option(600.0, "seconds a collective may take")
    sync_batchnorm: bool = option(False, "batch norm over all processes (GPUs only)")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a training run; stored as config.yaml in the run folder."""

    plugins: str | list[str] = option("", PLUGINS)
    data: Tree = option({"name": "digits"}, "data set and its settings: `fusionzoo data list`")
    target: str | list[str] = option("", TARGET)
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's default")
    fusion: Tree = option({"name": "gmu"}, "fusion and its settings: `fusionzoo zoo`")
    balance: str | list[str] = option("", "training strategies: `ogm_ge,modality_dropout`")
    balance_settings: dict[str, Tree] = option({}, "training strategy -> its settings")
    matryoshka: str | int | list[int] = option(
        "", "also train the first entries of the vectors, `64,128`, for `embed.py --matryoshka`"
    )
    objective: Tree = option({"name": "classification"}, "what is learnt: docs/objectives.md")
    targets: dict[str, Tree] = option({}, "column -> objective, for several targets")
    preset: Literal["none", "fast", "good", "best"] = option(
        "good",
        "choose encoders, how long and how to train by what is there: fast | good | best; none ="
        " the defaults of all other settings",
    )
    given: Tree = field(default_factory=dict, metadata=HIDDEN, compare=False)  # of the user
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    log: Literal["tensorboard", "wandb", "mlflow", "none"] = option(
        "none", "experiment logger; with torchrun: torchrun ... -- train.py --log ..."
    )
    seed: int = option(0, "seed of weights, order, dropout and augmentation")
    device: str = option("auto", "auto | cpu | cuda | cuda:1 | xpu | mps")
    out: str | None = option(None, "run folder; none = runs/<data set>, numbered if it exists")
    resume: Literal[False, True, "auto", "anyway"] = option(
        False,
        "continue the run in `out` from its last checkpoint; auto: start if there is none; anyway:"
        " even if the data are no longer those trained on",
    )


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """Settings that embedding, evaluation and prediction share: a model, run over data."""

    @classmethod
    def of(cls, cfg: Any, **changes: Any) -> Self:
        """Return settings of this kind, with the values that another command's have by name."""
        shared = {x.name: getattr(cfg, x.name) for x in fields(cls) if hasattr(cfg, x.name)}
        return cls(**(shared | changes))

    model: str = option("", "model folder, or run folder with a model in it (required)")
    target: str | list[str] = option("", "label column, where it has another name than in training")
    plugins: str | list[str] = option("", PLUGINS)
    batch_size: Count = option(64, "samples per step")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes; none = chosen by cores"
    )
    device: str = option("auto", "auto | cpu | cuda | cuda:1 | xpu | mps")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(ModelUse):
    data: Tree = option({}, "data set and its settings; empty = those of the training")
    split: str = option("test", "train | val | test | all")
    every_subset: bool = option(False, "also measure the fusion given each subset of modalities")
    subgroups: str | list[str] = option(
        "", "columns of the data, `sex,site`: also compare the samples of each of their values"
    )
    threshold: Between | None = option(None, THRESHOLD)
    thresholds: dict[str, Between] = option({}, THRESHOLDS)
    out: str = option("", "JSON file for the metrics; empty = print them only")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(ModelUse):
    data: Tree = option({}, "data set and its settings (required): `fusionzoo data list`")
    split: str = option("all", "train | val | test | all")
    out: str = option("", "file for the predictions, .csv or .parquet")
    coverage: Between | None = option(
        None, "0.9: also columns `set`, or `lower` and `upper`, that hold the truth in 90 %"
    )
    threshold: Between | None = option(None, THRESHOLD)
    thresholds: dict[str, Between] = option({}, THRESHOLDS)


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """All settings of a comparison of fusions; stored as config.yaml beside the report."""

    plugins: str | list[str] = option("", PLUGINS)
    data: Tree = option({"name": "digits"}, "data set and its settings: `fusionzoo data list`")
    target: str | list[str] = option("", TARGET)
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's default")
    fusions: str | list[str] = option("all", "names or families, `mbt,lmf,late`, or all")
    fusion: Tree = option({"dim": 128}, "settings for all fusions; a fusion without one ignores it")
    settings: dict[str, Tree] = option({}, "fusion -> its settings")
    baselines: str | list[str] = option(
        "all", "what fusion is compared with: `alone,linear,trees,kernels,tabular`, all or none"
    )
    balance: str | list[str] = option(
        "none", "training strategies, each with every fusion: `none,mla,ogm_ge+modality_dropout`"
    )
    balance_settings: dict[str, Tree] = option({}, "training strategy -> its settings")
    objective: Tree = option({"name": "classification"}, "what is learnt: docs/objectives.md")
    targets: dict[str, Tree] = option({}, "column -> objective, for several targets")
    metric: str = option(
        "",
        "figure that compares candidates and chooses epochs and settings: auroc, loss, or any in"
        " metrics.json; empty = compare by that of the objective, choose by the loss",
    )
    mode: Literal["probe", "finetune"] = option(
        "probe", "probe: encoders frozen, features cached; finetune: end to end"
    )
    seeds: Count = option(3, "training seeds of each candidate")
    folds: Annotated[int, Ge(0)] | None = option(
        None, "cross-validation folds; 0 = the data's split; none = 5 below 5,000 samples, else 0"
    )
    splits: str | list[str] = option(
        "", "instead of folds: files of `id` and `split`, or columns of the table, `fold_1,fold_2`"
    )
    repeats: Count | None = option(
        None, "instead of folds: random splits by --data.shares, of the seeds from --seed on"
    )
    epochs: Count = option(40, "maximum passes over the training split")
    patience: Count | None = option(5, "epochs without a better validation loss; none = never stop")
    batch_size: Count = option(32, "samples per step")
    optim: OptimConfig = field(default_factory=OptimConfig)
    tune: Annotated[int, Ge(0)] | None = option(
        None,
        "Optuna trials of each candidate and fold, on validation data; none = 8, in finetune mode"
        " 0",
    )
    refit: bool | None = option(
        None,
        "test models trained anew on train and validation together, for the epochs that validation"
        " chose; none = in probe mode with folds",
    )
    time_limit: str | Positive | None = option(
        None, "report what is done after this time: 90s, 20m, 1.5h; the same command goes on"
    )
    encoder_epochs: Count = option(10, "probe: epochs to train encoders without weights")
    max_tokens: dict[str, Count] = option({}, "modality -> maximum tokens; neighbours averaged")
    standardise: bool = option(True, "probe: centre and scale features by the training split")
    controls: bool = option(True, "also train on shuffled labels, expecting chance level")
    corruptions: Literal["none", "sample", "full"] = option(
        "sample", "also test on damaged samples: a third of them at 3 severities, or all at 5"
    )
    jobs: Count | None = option(None, "processes; none = one per core, one thread each")
    num_workers: Annotated[int, Ge(0)] | None = option(None, "loader processes while encoding")
    device: str = option("auto", "auto | cpu | cuda | cuda:1 | xpu | mps")
    seed: int = option(0, "first training seed; also seeds encoders, folds and tuning")
    out: str = option("report", "folder of the report and its trials")
    combine: str | list[str] = option(
        "", "folders of finished reports, `a,b`: rank the fusions over them"
    )
    external: str = option(
        "",
        "Parquet file of others' predictions, id and p_<class>, which are tested against ours"
        " sample by sample",
    )
    figures: Literal["none", "pdf"] = option(
        "none", "pdf: also write every figure of the page to figures/, for a paper"
    )
    shard: str = option(
        "",
        "run the i-th of n parts of the jobs, `3/8`, without a report; the same command without"
        " it reports",
    )


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(ModelUse):
    encoders: dict[str, Tree] = option(
        {}, "without --model: modality -> pretrained encoder; empty = the data set's default"
    )
    fusion: Tree = option({}, "without --model: concat, max, mean or sum, without any weights")
    data: Tree = option({}, "data set and its settings; empty = that of the run")
    split: str = option("all", "train | val | test | all")
    out: str = option(
        "embeddings.parquet", "x.parquet | x.npy | a folder, for a Parquet file per part"
    )
    dtype: Literal["float32", "float16"] = option("float32", "numbers of the vectors")
    normalise: bool = option(False, "write unit vectors")
    matryoshka: str | int | list[int] = option(
        "", "also write the first entries of the fused vector, `64,128`: columns fused_64, ..."
    )
    probabilities: bool = option(False, "also write the probability of each class")
    weights: bool = option(False, "also write the weight of each modality in the fusion")
    layer: str | dict[str, str | list[str]] = option(
        "", "also write inner layers of encoders, pooled, `image=layer3`: columns image_layer3, ..."
    )
    amp: Literal["none", "bf16"] = option("none", "mixed precision")
    compile: bool = option(False, "torch.compile encoders and fusion")
    row_group: Count = option(4096, "rows of a part: what a killed run computes again")
    dist: DistConfig = field(default_factory=DistConfig)


C = TypeVar("C", RunConfig, BenchmarkConfig)


def drop_deselected(cfg: C, deselected: Sequence[str]) -> tuple[C, list[str]]:
    """Return `cfg` without the settings of deselected modalities, and the flags dropped."""
    flags: list[str] = []

    def prune(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
        flags.extend(f"--{section}.{name}" for name in settings if name in deselected)
        return {name: value for name, value in settings.items() if name not in deselected}

    changes: dict[str, Any] = {"encoders": prune(cfg.encoders, "encoders")}
    if isinstance(cfg.data.get("augment"), Mapping):
        changes["data"] = {**cfg.data, "augment": prune(cfg.data["augment"], "data.augment")}
    optim: dict[str, Any] = {key: prune(getattr(cfg.optim, key), f"optim.{key}") for key in KEYED}
    changes["optim"] = replace(cfg.optim, **optim)
    if isinstance(cfg, BenchmarkConfig):
        changes["max_tokens"] = prune(cfg.max_tokens, "max_tokens")
    else:
        changes["balance_settings"] = {
            strategy: {
                key: prune(value, f"balance_settings.{strategy}.{key}")
                if isinstance(value, Mapping)
                else value
                for key, value in settings.items()
            }
            for strategy, settings in cfg.balance_settings.items()
        }
    return replace(cfg, **changes), flags
