"""One model trained several times: `train.trials` keeps the best by validation.

The first three trials differ in their learning rates, the others in their seed, with the rates that
were best. Each is an ordinary run, in `trials/<number>` of the run folder; `train.seeds`, whose
trainings are joined (`seeds.py`), repeats a run in the same way.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fusionzoo.config import RunConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json
from fusionzoo.machine.distributed import World, from_main, on_main

from .checkpoint import check_data
from .multitask import Tasks
from .run_folder import store_config
from .tracker import Tracker

FACTORS = (1.0, 1 / 3, 3.0)  # of all learning rates, in the first trials
KEPT = ("model", "metrics.json", "metrics.jsonl", "groups.json", "tensorboard")  # of the best
DROPPED = ("model", "checkpoints")  # of the others


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A finished training."""

    seed: int
    best_epoch: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trial(TrainingResult):
    """A finished trial; `rank` is higher for a better one."""

    factor: float  # of all learning rates
    rank: list[float]  # of its best epoch, by `Tasks.rank`
    figure: float  # of the leading metric on the validation split


F = TypeVar("F", bound=TrainingResult)


class Repeats(ABC, Generic[F]):
    """The trainings of a run folder: which are finished, and which is next.

    Each is a run of its own in `<setting>/<number>`; `<setting>.json` lists the finished ones.
    """

    setting: ClassVar[str]  # of `train`, the number of trainings
    entry: type[F]

    def __init__(
        self, folder: Path, cfg: RunConfig, data: dict[str, str], world: World, *, resume: bool
    ) -> None:
        self.folder, self.cfg, self.data, self.world = folder, cfg, data, world
        self.resume = resume
        self.count: int = getattr(cfg.train, self.setting)
        self.finished: list[F] = on_main(lambda: self._read() if resume else [], world)
        self._write()
        if world.main:
            store_config(cfg, folder)  # a run that goes on may have another number

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.setting}.json"

    def _read(self) -> list[F]:
        if not self._file.is_file():
            raise FusionZooError(
                f"{self.folder} holds no {self.setting} to go on with: --train.{self.setting} 1"
                f" resumes a single training, another --out starts {self.setting}"
            )
        stored = json.loads(self._file.read_text(encoding="utf-8"))
        check_data(self._file, stored, self.data, anyway=self.cfg.resume == "anyway")
        known = {x.name for x in fields(self.entry)}
        return [
            self.entry(**{name: x for name, x in finished.items() if name in known})
            for finished in stored["finished"]
        ]

    def _write(self) -> None:
        if self.world.main:
            contents = {"data": self.data, "finished": [asdict(x) for x in self.finished]}
            write_json(self._file, contents)

    def folder_of(self, number: int) -> Path:
        """Return the run folder of a training, counted from 1."""
        return self.folder / self.setting / str(number)

    def results_of(self, number: int) -> dict[str, Any]:
        """Return the metrics.json of a finished training, counted from 1."""
        path = self.folder_of(number) / "metrics.json"
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return results

    @property
    def number(self) -> int:
        """The next training, counted from 1."""
        return len(self.finished) + 1

    @property
    def title(self) -> str:
        """What to say when the next training begins."""
        return f"{self.setting.removesuffix('s')} {self.number} of {self.count}"

    def obstacle(self, seconds_left: float) -> str:
        """Say why no further training begins; empty: one does, as the first one always does."""
        longest = max((x.seconds for x in self.finished), default=0.0)
        if not self.finished or longest <= from_main(seconds_left, self.world):
            return ""
        return (
            f"time for {len(self.finished)} of {self.count} {self.setting}: --resume --out"
            f" {self.folder} goes on with the others"
        )

    @abstractmethod
    def chosen(self) -> dict[str, Any]:
        """Return what is the next training's own, its seed among it, as the list stores it."""

    @abstractmethod
    def finish(self, dataset: PairedDataset, tasks: Tasks, tracker: Tracker) -> dict[str, Any]:
        """Make the run folder's model and results of the finished trainings; return the results."""

    def settings(self) -> RunConfig:
        """Return the settings of the next training, a run of its own."""
        train: dict[str, Any] = {self.setting: 1}
        return replace(
            self.cfg,
            seed=self.chosen()["seed"],
            train=replace(self.cfg.train, **train),
            out=str(self.folder_of(self.number)),
            resume=("anyway" if self.cfg.resume == "anyway" else "auto") if self.resume else False,
        )

    def add(self, tasks: Tasks, seconds: float) -> None:
        """Take the results of the training that just ended; drop files that are not needed."""
        finished = None
        if self.world.main:
            results = self.results_of(self.number)
            finished = self.entry(
                **self.chosen(),
                **self.judged(tasks, results["val"]),
                best_epoch=results["best_epoch"],
                seconds=seconds,
            )
        self.finished.append(from_main(finished, self.world))
        self._write()
        if self.world.main:
            self.drop()

    def judged(self, tasks: Tasks, val: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a finished training that its validation figures tell."""
        return {}

    @abstractmethod
    def drop(self) -> None:
        """Remove files of finished trainings that are not needed."""


class Trials(Repeats[Trial]):
    """The trials of a run folder, of which the best stays."""

    setting = "trials"
    entry = Trial

    @property
    def best(self) -> int:
        """The position of the best trial; of equal ones, the first."""
        ranks = [x.rank for x in self.finished]
        return ranks.index(max(ranks))

    def chosen(self) -> dict[str, Any]:
        factor, seed = next_values(self.cfg.seed, self.finished)
        return {"factor": factor, "seed": seed}

    def settings(self) -> RunConfig:
        """Return the settings of the next trial, its learning rates scaled."""
        factor, optim = self.chosen()["factor"], self.cfg.optim
        scaled: dict[str, Any] = {
            "lr": factor * optim.lr,
            "modality_lr": {name: factor * x for name, x in optim.modality_lr.items()},
        }
        return replace(super().settings(), optim=replace(optim, **scaled))

    def judged(self, tasks: Tasks, val: Mapping[str, Any]) -> dict[str, Any]:
        return {"rank": [*tasks.rank(val)], "figure": val.get(tasks.leading, val["loss"])}

    def drop(self) -> None:
        """Remove the weights of all but the best."""
        for number in range(1, self.number):
            for name in DROPPED if number != self.best + 1 else ():
                shutil.rmtree(self.folder_of(number) / name, ignore_errors=True)

    def finish(self, dataset: PairedDataset, tasks: Tasks, tracker: Tracker) -> dict[str, Any]:
        """Copy the best trial's model and results into the run folder; return the results."""
        source = self.folder_of(self.best + 1)
        results: dict[str, Any] = {}
        if self.world.main:
            for name in KEPT:
                _replace(source / name, self.folder / name)
            results = self.results_of(self.best + 1)
        tracker.table("Trials, by validation", *self.rows(tasks.leading))
        return from_main(results, self.world)

    def rows(self, leading: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return header and rows of the table of finished trials."""
        header = ("trial", "learning rates", "seed", f"val {leading}", "best epoch", "seconds")
        return header, [
            (
                f"{number + 1}{' (kept)' if number == self.best else ''}",
                f"x {trial.factor:.2g}",
                str(trial.seed),
                f"{trial.figure:.3f}",
                str(trial.best_epoch),
                f"{trial.seconds:.0f}",
            )
            for number, trial in enumerate(self.finished)
        ]


def next_values(seed: int, finished: Sequence[Trial]) -> tuple[float, int]:
    """Return the next trial's factor of the learning rates, and its seed.

    >>> next_values(7, [])
    (1.0, 7)
    """
    if len(finished) < len(FACTORS):
        return FACTORS[len(finished)], seed
    best = max(finished[: len(FACTORS)], key=lambda trial: trial.rank)
    return best.factor, seed + len(finished) - len(FACTORS) + 1


def _replace(source: Path, target: Path) -> None:
    """Copy a file or folder over another; what is not there is not copied."""
    copy: Callable[..., Any] = shutil.copytree if source.is_dir() else shutil.copy2
    if target.is_dir():
        shutil.rmtree(target)
    if source.exists():
        copy(source, target)
