"""`--speed auto`: choose settings by measured speed; a default stays unless beaten clearly."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from fusionzoo.config import TrainConfig
from fusionzoo.config.schema import ModelUse
from fusionzoo.datasets import PairedBatchSampler, PairedDataset
from fusionzoo.datasets.loader import make_loader
from fusionzoo.devices import is_out_of_memory, num_cores, same_randomness, wait_for
from fusionzoo.distributed import World, from_main
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.files import write_json
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features

from .loaders import build_loader, num_workers
from .objective import Objective
from .optim import AMP_DTYPES, autocast
from .trainer import Trainer

MARGIN = 0.10  # share of the default's time that another value must save
SHARE = 0.05  # of the work's estimated time that measuring may take
LONGEST = 60.0  # seconds of measuring, however long the work
SHORTEST = 1.0  # seconds; with less to spend, nothing but the default is measured

Settings = dict[str, Any]
CHOSEN = "chosen"
DISTINCT = 4  # batches of samples; longer measurements repeat them
SECONDS = 0.5  # that one measurement takes at least
MOST_BATCHES = 64
Keys = list[tuple[int, int]]
Loaders = dict[str, DataLoader[Batch]]
FILE = "speed.json"
COMPILING = 30.0  # seconds to expect of torch.compile: not tried in shorter work


class Timing(NamedTuple):
    """What one combination of settings costs."""

    seconds: float  # per sample
    once: float = 0.0  # seconds before the first result, as of compiling


@dataclass(frozen=True)
class Option:
    """Values of a setting to try, in this order; after one that loses the rest is left out."""

    setting: str
    values: Sequence[Any]
    takes: float = 0.0  # seconds that measuring one value takes at least


@dataclass(frozen=True)
class TimedSetting:
    """A measured value."""

    setting: str  # empty: the defaults
    value: Any
    samples_per_second: float | None  # None: not measured
    note: str  # why it was chosen or not


@dataclass(frozen=True)
class SpeedChoice:
    """The chosen settings, and what was measured."""

    settings: Settings
    trials: list[TimedSetting] = field(default_factory=list)
    seconds: float = 0.0  # that measuring took

    @property
    def record(self) -> dict[str, Any]:
        """What is stored."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SpeedChoice:
        """Return a choice that was stored."""
        trials = [TimedSetting(**trial) for trial in record["trials"]]
        return cls(dict(record["settings"]), trials, record["seconds"])


def choose(
    defaults: Settings,
    options: Sequence[Option],
    measure: Callable[[Settings], Timing],
    *,
    samples: int,
    clock: Callable[[], float] = time.perf_counter,
) -> SpeedChoice:
    """Return the fastest settings for work on `samples` samples, one setting after the other.

    Measuring stops after 5 % of the time that the defaults would take, and after a minute. A value
    is taken if it saves 10 % of the time, what it costs once included, in two measurements that
    alternate with the best settings so far: so the choice is slower than the defaults by no more
    than the time of measuring, but for noise.
    """
    start = clock()
    measure(defaults)  # files are read and kernels chosen: not counted
    best, timing = dict(defaults), measure(defaults)
    budget = min(LONGEST, SHARE * samples * timing.seconds)
    trials = [TimedSetting("", None, 1 / timing.seconds, "the defaults")]
    for option in options:
        for value in option.values:
            left = budget - (clock() - start)
            if budget < SHORTEST or left < max(option.takes, 0.0):
                trials.append(TimedSetting(option.setting, value, None, "no time to measure it"))
                continue
            settings = {**best, option.setting: value}
            measured, note = _compare(settings, best, timing, measure, samples)
            rate = None if measured is None else 1 / measured.seconds
            trials.append(TimedSetting(option.setting, value, rate, note))
            if measured is None or note != CHOSEN:
                break
            best, timing = settings, measured
    return SpeedChoice(best, trials, clock() - start)


def _compare(
    settings: Settings,
    best: Settings,
    timing: Timing,
    measure: Callable[[Settings], Timing],
    samples: int,
) -> tuple[Timing | None, str]:
    """Measure settings against the best so far; return their timing, and a note."""
    try:
        measured = measure(settings)
        if not wins(measured, timing, samples):
            return measured, f"does not save {MARGIN:.0%}"
        again, confirmed = measure(best), measure(settings)
    except (FusionZooError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            return None, "out of memory"
        return None, f"does not work here: {one_line(error)}"
    if not wins(confirmed, again, samples):
        return confirmed, f"does not save {MARGIN:.0%} in a second measurement"
    return confirmed, CHOSEN


def wins(timing: Timing, default: Timing, samples: int) -> bool:
    """Whether the work is done in 10 % less time than by the default, what is paid once included.

    >>> wins(Timing(0.8), Timing(1.0), 100), wins(Timing(0.8, once=15), Timing(1.0), 100)
    (True, False)
    """
    cost = timing.once + samples * timing.seconds
    return cost < (1 - MARGIN) * samples * default.seconds


def describe_choice(choice: SpeedChoice, defaults: Settings, where: str) -> str:
    """Return one line on what was chosen, and how much faster it is.

    >>> tried = [TimedSetting("", None, 10.0, "the defaults")]
    >>> tried += [TimedSetting("amp", "bf16", 15.0, "chosen")]
    >>> choice = SpeedChoice({"amp": "bf16"}, tried, 3.0)
    >>> describe_choice(choice, {"amp": "none"}, "a.json")
    '--speed auto: amp bf16 (15 samples/s; 10 with the defaults); measured in 3.0 s, see a.json'
    """
    changed = {name: x for name, x in choice.settings.items() if x != defaults.get(name)}
    rate = choice.trials[0].samples_per_second or 0.0
    end = f"measured in {choice.seconds:.1f} s, see {where}"
    if not changed:
        return f"--speed auto: the defaults stay ({rate:,.0f} samples/s); {end}"
    best = [t.samples_per_second for t in choice.trials if t.note == CHOSEN][-1] or 0.0
    words = {name: "on" if value is True else value for name, value in changed.items()}
    named = ", ".join(f"{name} {word}" for name, word in words.items())
    return f"--speed auto: {named} ({best:,.0f} samples/s; {rate:,.0f} with the defaults); {end}"


def measure_loading(
    dataset: PairedDataset,
    collate: Any,
    keys: Sequence[Keys],
    workers: int,
    work: Callable[[Batch], None],
    device: torch.device,
) -> Timing:
    """Time loading and `work` together, after a batch for each worker, and one more.

    At least half a second and three batches, or two for each worker, so that what the workers
    prepared beforehand does not count.
    """
    warm, least = 1 + workers, max(3, 2 * workers)
    batches = list(islice(cycle(keys), warm + MOST_BATCHES))
    iterator = iter(make_loader(dataset, batches, collate, num_workers=workers, device=device))
    started = time.perf_counter()
    for batch in islice(iterator, warm):
        work(batch.to(device))
    wait_for(device)
    start, samples, number = time.perf_counter(), 0, 0
    for batch in iterator:
        work(batch.to(device))
        samples, number = samples + len(batch.ids), number + 1
        if number >= least and time.perf_counter() - start >= SECONDS:
            break
    wait_for(device)
    seconds = (time.perf_counter() - start) / max(samples, 1)
    rows = sum(len(batch) for batch in islice(cycle(keys), warm))
    return Timing(max(seconds, 1e-9), max(0.0, start - started - rows * seconds))


def worker_options(setting: int | None, default: int, world: World) -> list[Option]:
    """Return numbers of loader processes to try, unless the user set one."""
    if setting is not None:
        return []
    cores = max(1, num_cores() // world.size)
    values = [count for count in (1, 2, 4, 8) if count <= cores and count > default]
    fewer = [0] if default else []
    return [Option("num_workers", part) for part in (values, fewer) if part]


def format_options(model: FusionModel, *, channels_last: bool, bf16: bool) -> list[Option]:
    """Return what to try of memory format and precision, where the encoders have any use for it."""
    has_images = any(encoder.kind in ("image", "audio") for _, encoder in model.named_encoders())
    options = []
    if has_images and not channels_last:
        options.append(Option("channels_last", (True,)))
    if not bf16:
        options.append(Option("amp", ("bf16",)))
    return options


def set_memory_format(model: FusionModel, *, channels_last: bool) -> None:
    """Set the memory format of the encoders of images and audio, in place."""
    for _, encoder in model.named_encoders():
        if encoder.kind in ("image", "audio"):
            encoder.set_channels_last(channels_last)


def choose_for_training(
    trainer: Trainer, loaders: Loaders, folder: Path, *, resume: bool
) -> tuple[Loaders, list[str]]:
    """Set what a measurement finds faster, and return the loaders and what to say.

    The main process measures and decides for all; speed.json keeps the choice, and a resumed run
    takes the one it began with. Batch size, order and random draws stay as they are: bf16 alone
    changes numbers.
    """
    cfg, world = trainer.cfg, trainer.world
    if cfg.speed == "off":
        return loaders, []
    if cfg.dist.strategy == "fsdp":
        raise FusionZooError(
            "--speed auto measures on a copy of the model, whose weights fsdp shards: --speed off"
        )
    path, defaults = folder / FILE, _defaults(trainer)
    stored = from_main(_read(path) if world.main and resume else None, world)
    record = stored
    if record is None:
        measured = _measure(trainer, loaders["train"], defaults).record if world.main else None
        record = from_main(measured, world)
    choice = SpeedChoice.from_record(record)
    if stored is None and world.main:
        write_json(path, record)
    loaders = _apply(trainer, loaders, choice.settings)
    notes = [
        describe_choice(choice, defaults, FILE) if stored is None else f"--speed auto: as in {FILE}"
    ]
    if choice.settings["amp"] != defaults["amp"]:
        notes.append(
            "bf16: matrix products and convolutions are computed in bfloat16 (about 3 digits),"
            " weights and losses in float32; --speed off trains in full precision"
        )
    return loaders, notes


def _defaults(trainer: Trainer) -> Settings:
    train = trainer.cfg.train
    return {
        "channels_last": train.channels_last,
        "amp": train.amp,
        "num_workers": num_workers(train.num_workers, trainer.world),
    }


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _measure(trainer: Trainer, loader: DataLoader[Batch], defaults: Settings) -> SpeedChoice:
    """Time forward and backward passes on a copy of the module, without strategies."""
    train, world = trainer.cfg.train, trainer.world
    sampler = loader.batch_sampler
    assert isinstance(sampler, PairedBatchSampler)
    sampler.set_iters(0, sampler.epoch_length())
    keys = list(islice(iter(sampler), DISTINCT))
    keys = [batch for batch in keys if len(batch) == len(keys[0])]  # no short one at the end
    dataset: Any = loader.dataset
    options: list[Option] = [
        *format_options(
            trainer.module.model, channels_last=train.channels_last, bf16=train.amp != "none"
        ),
        *worker_options(train.num_workers, defaults["num_workers"], world),
    ]
    with same_randomness(world.device):
        module = copy.deepcopy(trainer.module)

        def measured(settings: Settings) -> Timing:
            set_memory_format(module.model, channels_last=settings["channels_last"])
            precision = replace(train, amp=settings["amp"])

            def work(batch: Batch) -> None:
                train_once(module, batch, precision, world.device)

            workers = settings["num_workers"]
            return measure_loading(dataset, loader.collate_fn, keys, workers, work, world.device)

        return choose(defaults, options, measured, samples=_samples(trainer, loader))


def train_once(module: Objective, batch: Batch, cfg: TrainConfig, device: torch.device) -> None:
    """Run a forward and a backward pass; the weights stay."""
    module.train()
    with autocast(cfg, device):
        output = module(batch)
    losses = [output.loss, *output.unimodal_loss.values()]
    torch.stack([loss.float().mean() for loss in losses]).sum().backward()
    module.zero_grad(set_to_none=True)


def _samples(trainer: Trainer, loader: DataLoader[Batch]) -> int:
    """Return the samples that this process trains on in the whole run."""
    train = trainer.cfg.train
    steps = train.epochs * len(loader)
    if train.max_steps is not None:
        steps = min(steps, train.max_steps * train.accumulate)
    return steps * train.batch_size


def _apply(trainer: Trainer, loaders: Loaders, settings: Settings) -> Loaders:
    """Set the chosen values for the trainer and new loaders."""
    cfg = trainer.cfg
    train = replace(cfg.train, **settings)
    trainer.cfg = replace(cfg, train=train)
    if train.channels_last != cfg.train.channels_last:
        set_memory_format(trainer.module.model, channels_last=train.channels_last)
    if train.num_workers == num_workers(cfg.train.num_workers, trainer.world):
        return loaders
    return {
        name: build_loader(loader.dataset, loader.collate_fn, trainer.cfg, trainer.world, name)  # type: ignore[arg-type]
        for name, loader in loaders.items()
    }


class Speed(NamedTuple):
    """How a model is run over data."""

    batch_size: int
    num_workers: int | None
    amp: torch.dtype | None = None
    notes: Sequence[str] = ()

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context; disabled in full precision."""
        return torch.autocast(device.type, dtype=self.amp, enabled=self.amp is not None)


def choose_for_inference(
    cfg: ModelUse,
    model: FusionModel,
    dataset: PairedDataset,
    out: str,
    world: World | None = None,
    *,
    stored: bool = False,
) -> Speed:
    """Return how to run a model over a data set, and set its memory format and compilation.

    With `--speed auto` the main process measures, and the choice is written to `<out>.speed.json`,
    if `out` is not empty; `stored` takes the choice that is written there, where there is one. A
    batch size or number of workers that the user set stays.
    """
    world = World() if world is None else world
    if cfg.speed == "off":
        return Speed(cfg.batch_size, cfg.num_workers)
    defaults: Settings = {
        "batch_size": cfg.batch_size,
        "channels_last": False,
        "amp": "none",
        "compile": False,
        "num_workers": num_workers(cfg.num_workers, world),
    }
    path = Path(f"{out}.speed.json")
    record = None
    if world.main and stored and path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
    elif world.main:
        record = measure(cfg, model, dataset, defaults, world).record
    choice = SpeedChoice.from_record(from_main(record, world))
    where = path.name if out else "above"
    if out and world.main:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, choice.record)
    notes = [describe_choice(choice, defaults, where)]
    settings = choice.settings
    if settings["amp"] != "none":
        notes.append(
            "bf16: outputs are computed in bfloat16 (about 3 digits); --speed off computes them in"
            " float32"
        )
    prepare(model, settings)
    amp = AMP_DTYPES[settings["amp"]]
    return Speed(settings["batch_size"], settings["num_workers"], amp, notes)


def prepare(model: FusionModel, settings: Settings) -> None:
    """Set the memory format, and compile encoders and fusion, in place."""
    if settings["channels_last"]:
        set_memory_format(model, channels_last=True)
    if settings["compile"]:
        for _, encoder in model.named_encoders():
            encoder.compile()
        model.fusion.compile()


def options_for(cfg: ModelUse, model: FusionModel, workers: int, world: World) -> list[Option]:
    """Return what to try: batch sizes only where the user set none."""
    sizes = [Option("batch_size", (128, 256)), Option("batch_size", (32, 16))]
    return [
        *worker_options(cfg.num_workers, workers, world),
        *format_options(model, channels_last=False, bf16=False),
        *(sizes if cfg.batch_size == ModelUse.batch_size else []),
        Option("compile", (True,), takes=COMPILING),
    ]


def measure(
    cfg: ModelUse, model: FusionModel, dataset: PairedDataset, defaults: Settings, world: World
) -> SpeedChoice:
    """Time loading and forward passes over samples of all lengths, on copies of the model."""
    device, collate = model.device, model.collate()
    ordered = dataset.by_length()
    options = options_for(cfg, model, defaults["num_workers"], world)

    @torch.no_grad()
    def measured(settings: Settings) -> Timing:
        trial = copy.deepcopy(model).eval()
        prepare(trial, settings)
        speed = Speed(settings["batch_size"], None, AMP_DTYPES[settings["amp"]])

        def work(batch: Batch) -> None:
            with speed.autocast(device):
                trial(batch)

        keys = spread(ordered, settings["batch_size"])
        longest: Any = collate([dataset[row] for row in ordered[: settings["batch_size"]]])
        work(longest.to(device))  # runs out of memory here, if it does
        return measure_loading(dataset, collate, keys, settings["num_workers"], work, device)

    with same_randomness(device):
        return choose(defaults, options, measured, samples=-(-len(dataset) // world.size))


def spread(ordered: Sequence[int], batch_size: int) -> list[Keys]:
    """Return batches of samples of similar lengths, spread evenly over all lengths."""
    number = min(DISTINCT, max(1, len(ordered) // batch_size))
    starts = torch.linspace(0, max(0, len(ordered) - batch_size), number).long().tolist()
    return [[(row, 0) for row in ordered[start : start + batch_size]] for start in starts]


def as_float32(features: Features) -> Features:
    """Return features of half precision in single precision, others as they are."""
    if features.pooled.dtype not in (torch.float16, torch.bfloat16):
        return features
    return Features(features.tokens.float(), features.mask, features.pooled.float())
