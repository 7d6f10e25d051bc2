"""Trials: one model trained several times, of which the best by validation stays; `train.trials`.

The first three differ in their learning rates, the others in their seed, with the rates that were
best. Each is an ordinary run, in `trials/<number>` of the run folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusionzoo.config import RunConfig
from fusionzoo.distributed import World, from_main
from fusionzoo.errors import FusionZooError
from fusionzoo.files import write_json

from .checkpoint import check_data
from .multitask import Tasks

FACTORS = (1.0, 1 / 3, 3.0)  # of all learning rates, in the first trials
FILE = "trials.json"
KEPT = ("model", "metrics.json", "metrics.jsonl", "groups.json", "tensorboard")  # of the best
DROPPED = ("model", "checkpoints")  # of the others


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A finished training; `rank` is higher for a better one."""

    factor: float  # of all learning rates
    seed: int
    rank: tuple[float, float]  # of its best epoch, by `Tasks.rank`
    figure: float  # of the leading metric on the validation split
    best_epoch: int
    seconds: float


class Trials:
    """The trials of a run folder: which are finished, which is next, which is best."""

    def __init__(
        self, folder: Path, cfg: RunConfig, data: dict[str, str], world: World, *, resume: bool
    ) -> None:
        self.folder, self.cfg, self.data, self.world = folder, cfg, data, world
        self.resume = resume
        finished: list[Trial] = []
        problem = ""
        if resume and world.main:
            try:
                finished = self._read()
            except FusionZooError as error:
                problem = str(error)
        self.finished, problem = from_main((finished, problem), world)
        if problem:
            raise FusionZooError(problem)
        self._write()

    def _read(self) -> list[Trial]:
        path = self.folder / FILE
        if not path.is_file():
            raise FusionZooError(
                f"{self.folder} holds no trials to go on with: --train.trials 1 resumes a single"
                " training, another --out starts trials"
            )
        stored = json.loads(path.read_text(encoding="utf-8"))
        check_data(path, stored, self.data, self.cfg.resume_anyway)
        return [Trial(**{**x, "rank": tuple(x["rank"])}) for x in stored["finished"]]

    def _write(self) -> None:
        if self.world.main:
            contents = {"data": self.data, "finished": [asdict(x) for x in self.finished]}
            write_json(self.folder / FILE, contents)

    def _of(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / "trials" / str(number)

    @property
    def number(self) -> int:
        """The next trial, counted from 1."""
        return len(self.finished) + 1

    @property
    def best(self) -> int:
        """The position of the best trial; of equal ones, the first."""
        ranks = [x.rank for x in self.finished]
        return ranks.index(max(ranks))

    def obstacle(self, seconds_left: float) -> str:
        """Say why no further trial begins; empty: one does, as the first one always does."""
        longest = max((x.seconds for x in self.finished), default=0.0)
        if not self.finished or longest <= from_main(seconds_left, self.world):
            return ""
        return (
            f"time for {len(self.finished)} of {self.cfg.train.trials} trials: --resume --out"
            f" {self.folder} goes on with the others"
        )

    def settings(self) -> RunConfig:
        """Return the settings of the next trial, a run of its own."""
        factor, seed = next_values(self.cfg.seed, self.finished)
        optim = self.cfg.optim
        scaled: dict[str, Any] = {
            "lr": factor * optim.lr,
            "fusion_lr": optim.fusion_lr and factor * optim.fusion_lr,
            "modality_lr": {name: factor * x for name, x in optim.modality_lr.items()},
        }
        return replace(
            self.cfg,
            seed=seed,
            optim=replace(optim, **scaled),
            train=replace(self.cfg.train, trials=1),
            out=str(self._of(self.number)),
            resume="auto" if self.resume else False,
            resume_anyway=self.cfg.resume_anyway and self.resume,
            overwrite=False,
        )

    def add(self, tasks: Tasks, seconds: float) -> None:
        """Take the results of the trial that just ended; of all but the best, the weights go."""
        factor, seed = next_values(self.cfg.seed, self.finished)
        trial = None
        if self.world.main:
            path = self._of(self.number) / "metrics.json"
            results = json.loads(path.read_text(encoding="utf-8"))
            trial = Trial(
                factor=factor,
                seed=seed,
                rank=tasks.rank(results["val"]),
                figure=results["val"].get(tasks.leading, results["val"]["loss"]),
                best_epoch=results["best_epoch"],
                seconds=seconds,
            )
        self.finished.append(from_main(trial, self.world))
        self._write()
        if self.world.main:
            for number in range(1, self.number):
                for name in DROPPED if number != self.best + 1 else ():
                    shutil.rmtree(self._of(number) / name, ignore_errors=True)

    def keep_best(self) -> dict[str, Any]:
        """Copy the best trial's model and results into the run folder; return the results."""
        source = self._of(self.best + 1)
        results: dict[str, Any] = {}
        if self.world.main:
            for name in KEPT:
                _replace(source / name, self.folder / name)
            results = json.loads((self.folder / "metrics.json").read_text(encoding="utf-8"))
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
