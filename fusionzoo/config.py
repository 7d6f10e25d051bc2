"""Settings of a run: typed dataclasses, a YAML file, dotted flags. Nothing heavy is imported here.

`python train.py --config a.yaml --optim.lr 1e-3 --fusion.name mbt`: flags win over the file, the
file wins over the defaults. The sections `data`, `fusion`, `objective`, `targets.<column>` and
`encoders.<modality>` name a registry entry; what else they hold are keyword arguments of that
entry's constructor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Interval

from ._flags import Tree, is_component, named, parse_flags, read_yaml
from .errors import FusionZooError, did_you_mean

C = TypeVar("C")
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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: Count = option(12, "passes over the training split")
    batch_size: Count = option(32, "samples per process and step")
    accumulate: Count = option(1, "batches whose gradients are averaged before a step")
    eval_batch_size: Count | None = option(None, "null = batch_size")
    num_workers: Annotated[int, Ge(0)] | None = option(
        None, "loader processes per rank; null = chosen by cores"
    )
    group_by_length: bool = option(False, "batches of similar lengths: less padding")
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
    engine: Literal["processes", "ray"] = option("processes", "what runs the cells")
    num_workers: Annotated[int, Ge(0)] | None = option(None, "loader processes of encoding")
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    seed: int = option(0, "first training seed; also of encoders trained alone, folds and tuning")
    out: str = option("report", "folder of the report and of the cells behind it")
    combine: tuple[str, ...] = option(
        (), "folders of finished reports: rank the strategies over them"
    )


def from_args(cls: type[C], args: Sequence[str]) -> C:
    """Build a configuration of type `cls` from command-line flags and the files they name."""
    flags = _named(cls, parse_flags(args))
    tree: Tree = {}
    config_file = flags.pop("config", None)
    if config_file is not None:
        tree = _named(cls, read_yaml(Path(str(config_file))))
    resume = flags.get("resume")
    if resume and not (flags.get("out") or tree.get("out")):
        raise FusionZooError("--resume needs --out: the folder of the run to continue")
    if resume and not config_file:
        stored = Path(str(flags["out"])) / "config.yaml"
        if resume != "auto" or stored.is_file():
            tree = _named(cls, read_yaml(stored))
    hints = get_type_hints(cls)
    sections = [one.name for one in fields(cls) if is_dataclass(hints[one.name])]  # type: ignore[arg-type]
    return from_tree(cls, merge(tree, flags, sections))


def from_tree(cls: type[C], tree: Mapping[str, Any]) -> C:
    """Validate a nested mapping and build `cls` from it; one clear line says what is wrong."""
    from pydantic import TypeAdapter, ValidationError

    known = _leaves(cls)
    tree = _named(cls, tree)
    _refuse_unknown(tree, known, "")
    _check_numbers(cls, tree)
    components = {key: value for key, value in asdict(cls()).items() if known.get(key)}  # type: ignore[call-overload]
    try:
        return TypeAdapter(cls).validate_python(merge(components, tree))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise FusionZooError(f"--{key} {first['input']!r}: {reason}") from None


def write_yaml(config: Any, path: Path) -> None:
    """Write a complete, resolved configuration."""
    import yaml

    tree = json.loads(json.dumps(asdict(config)))
    partial = path.with_suffix(".partial")  # a kill leaves the old file or the new one
    partial.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    partial.replace(path)


def merge(base: Mapping[str, Any], over: Mapping[str, Any], sections: Sequence[str] = ()) -> Tree:
    """Lay `over` on `base`; a component with another name does not inherit the old settings.

    `sections` are none: of the optimiser, another name leaves all but what stands in `settings`.
    """
    out = {} if _renamed(base, over) else dict(base)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            if key in sections and _renamed(below, value):
                below = {k: x for k, x in below.items() if k not in ("name", "settings")}
            value = merge(below, value)
        out[key] = value
    return out


def _renamed(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return "name" in over and "name" in base and over["name"] != base["name"]


def split_name(component: Mapping[str, Any], what: str) -> tuple[str, Tree]:
    """Split `{"name": n, **settings}`; a component without a name is an error."""
    settings = dict(component)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise FusionZooError(f"{what} has no name: give --{what}.name")
    return name, settings


def help_text(cls: type, prefix: str = "") -> str:
    """Return a line per setting: flag, default, meaning."""
    lines = []
    hints = get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            lines.append(help_text(hints[one.name], f"{prefix}{one.name}."))
        else:
            flag = f"--{prefix}{one.name}"
            says = one.metadata.get("help", "")
            lines.append(f"  {flag:<28} {_default(one)!s:<34} {says}".rstrip())
    return "\n".join(lines)


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return json.dumps(one.default_factory())
    return "null" if one.default is None else one.default


def _leaves(cls: Any, prefix: str = "") -> dict[str, bool]:
    """Map each dotted key to whether it may hold keys of its own."""
    found: dict[str, bool] = {}
    hints = get_type_hints(cls)
    for one in fields(cls):
        key, hint = prefix + one.name, hints[one.name]
        if is_dataclass(hint):
            found |= _leaves(hint, f"{key}.")
        else:
            found[key] = getattr(hint, "__origin__", None) is dict
    return found


def _refuse_unknown(tree: Mapping[str, Any], known: Mapping[str, bool], prefix: str) -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known:
            if known[key] and not isinstance(value, Mapping):
                raise FusionZooError(f"--{key} holds settings: give --{key}.<setting> {value}")
            continue
        if not any(leaf.startswith(f"{key}.") for leaf in known):
            raise FusionZooError(
                f"unknown setting --{key}.{_nearest_flag(key, known)} --help lists all of them."
            )
        if not isinstance(value, Mapping):
            raise FusionZooError(f"--{key} is a group of settings: give --{key}.<setting> {value}")
        _refuse_unknown(value, known, f"{key}.")


def _nearest_flag(key: str, known: Mapping[str, bool]) -> str:
    """Suggest the flag with the same last part, else with the nearest one."""
    sections = {leaf.rpartition(".")[0] for leaf in known} - {""}
    flags = [*known, *sorted(sections)]
    if "." not in key:
        leaves = {flag.rpartition(".")[2]: flag for flag in reversed(flags)}
        near = get_close_matches(key, leaves, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {'--' + leaves[near[0]]!r}?"
    return did_you_mean(f"--{key}", [f"--{flag}" for flag in flags])


def _named(cls: Any, tree: Mapping[str, Any]) -> Tree:
    """Write components given by a word as mappings, unless this field holds no component."""
    plain = {
        one.name
        for one in fields(cls)
        if is_component([one.name])
        and one.default_factory is not MISSING
        and "name" not in (one.default_factory() or {"name": ""})
    }
    return {**named(tree), **{key: tree[key] for key in plain & tree.keys()}}


def _check_numbers(cls: Any, tree: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what would pass as a number: yes and no, infinity, and a flag without its value."""
    hints = get_type_hints(cls, include_extras=True)
    for name, value in tree.items():
        if is_dataclass(hints[name]):
            _check_numbers(hints[name], value, f"{prefix}{name}.")
            continue
        for key, leaf in _walk(value, f"{prefix}{name}"):
            if isinstance(leaf, bool) and not _takes_bool(hints[name]):
                raise FusionZooError(
                    f"--{key} {str(leaf).lower()}: it needs a value of another kind"
                    " (a flag without a value means true)"
                )
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise FusionZooError(f"--{key} {leaf}: it must be a finite number")


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _walk(below, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _walk(below, key)
    else:
        yield key, value


def _takes_bool(hint: Any) -> bool:
    """Whether a type holds true or false; what settings of a component hold, that checks."""
    if hint is bool or hint is Any or isinstance(hint, bool):
        return True
    return any(_takes_bool(part) for part in get_args(hint))
