"""`fusionzoo reproduce`: train as a paper did, and compare with its figures and its authors' code.

A file in configs/papers/ holds what the paper did and what came out; figures are per cent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen

from fusionzoo.config import RunConfig, from_tree, read_yaml
from fusionzoo.config.flags import Tree, papers
from fusionzoo.config.load import Usage, run_command
from fusionzoo.config.schema import Count, option
from fusionzoo.errors import FusionZooError, did_you_mean, first_problem, keyword_errors, located
from fusionzoo.files import sha256_of, write_json
from fusionzoo.ground.console import command_line, print_table
from fusionzoo.training.run import train

SEEDS = 5  # trainings, where nobody ran the authors' code
STANDARD_ERRORS = 2  # a difference within so many counts as none
PROTOCOL, RESULTS = "protocol.json", "results.json"  # files in the folder of all seeds
USAGE = Usage(
    name="reproduce",
    purpose="Train as a paper did; compare with its figures and its authors' code.",
    words=("name",),
    examples=("", "tmc-handwritten --data ~/Downloads", "tmc-handwritten --seeds 1 --out runs/a"),
    common=("name", "data", "seeds", "out", "device"),
    more="Without a name: the papers that there are. The same command goes on where one stopped.",
)


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Settings of a reproduction; those of the training are the paper's."""

    name: str = option("", "a paper, or a YAML file like those in configs/papers/; empty = list")
    data: str = option(".", "folder that holds the paper's data files")
    seeds: Count | None = option(
        None,
        "trainings, from seeds 0, 1, ..., each with its random split if the paper has them; none ="
        " as many as of the authors' code, or 5",
    )
    out: str = option("", "folder of the runs and results.json; empty = runs/<name>")
    device: str = option("auto", "auto | cpu | cuda | cuda:1 | xpu | mps")


class _Strict:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Publication(_Strict):
    """Where a method was published."""

    citation: str
    year: int
    link: str


@dataclass(frozen=True, kw_only=True)
class AuthorsCode(_Strict):
    """The authors' repository, at the commit that was read."""

    repository: str
    commit: str
    licence: str


@dataclass(frozen=True, kw_only=True)
class PaperFile(_Strict):
    """A data file that the user brings."""

    name: str
    sha256: str
    link: str
    licence: str


@dataclass(frozen=True, kw_only=True)
class PaperFigures(_Strict):
    """A metric in per cent over several trainings; `spread` is their standard deviation."""

    mean: float
    spread: float | None = None  # None: not known, or of one training
    runs: Annotated[int, Ge(1)] | None = None  # None: not said
    source: str = ""

    @classmethod
    def of(cls, values: Sequence[float], source: str = "") -> PaperFigures:
        """Return the figures of one value per training.

        >>> PaperFigures.of([98.0, 99.0])
        PaperFigures(mean=98.5, spread=0.7071067811865476, runs=2, source='')
        """
        spread = stdev(values) if len(values) > 1 else None
        return cls(mean=fmean(values), spread=spread, runs=len(values), source=source)


@dataclass(frozen=True, kw_only=True)
class AuthorsRuns(_Strict):
    """What the authors' code gave when we ran it, in per cent: a value for each seed or split."""

    values: Annotated[list[float], MinLen(1)]  # of seeds or splits 0, 1, ..., as ours
    source: str  # the command, and what had to be changed to run it

    @property
    def figures(self) -> PaperFigures:
        """Their mean and standard deviation."""
        return PaperFigures.of(self.values, self.source)


@dataclass(frozen=True, kw_only=True)
class Paper(_Strict):
    """What a paper did, and what came out: a file of configs/papers/."""

    title: str
    paper: Publication
    code: AuthorsCode
    files: list[
        PaperFile
    ]  # the first is opened, unless `root` of the run names another or a folder
    metric: str  # as metrics.json calls it, of the test split
    epoch: str  # which rule chose it
    published: PaperFigures | None = None  # None: not known to us
    authors: AuthorsRuns | None = None  # None: nobody ran their code
    # What differs from training to training: the seed, or also the random split, as on their side.
    repeat: Literal["seed", "split"] = "seed"
    differs: list[str] = field(default_factory=list)  # what we do otherwise
    run: Tree  # settings of `fusionzoo train`


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A paper's figures, those of its authors' code, and ours.

    `values` has one figure in per cent for each seed. `exit_code` is 0, or that of a training that
    was stopped, whose seed is not among them.
    """

    name: str
    paper: Paper
    values: tuple[float, ...]
    exit_code: int = 0

    @cached_property
    def ours(self) -> PaperFigures:
        """Our mean and standard deviation."""
        return PaperFigures.of(self.values)

    @property
    def verdict(self) -> str:
        """Whether ours equals the authors' code, in one sentence."""
        authors = () if self.paper.authors is None else self.paper.authors.values
        return compare(authors, self.values, paired=self.paper.repeat == "split")

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % interval of our mean over seeds; NaN for one seed."""
        from fusionzoo.evaluation.statistics import seed_interval

        _, low, high = seed_interval(self.values)
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: what results.json holds."""
        paper, (low, high) = self.paper, self.interval
        bounds = {} if math.isnan(low) else {"low": low, "high": high}
        return {
            "name": self.name,
            "title": paper.title,
            "paper": asdict(paper.paper),
            "code": asdict(paper.code),
            "metric": paper.metric,
            "unit": "per cent",
            "epoch": paper.epoch,
            "published": None if paper.published is None else asdict(paper.published),
            "repeat": paper.repeat,
            "authors": None
            if paper.authors is None
            else {"values": paper.authors.values, **asdict(paper.authors.figures)},
            "ours": {"values": list(self.values), **asdict(self.ours), **bounds},
            "verdict": self.verdict,
            "differs": paper.differs,
        }


def compare(authors: Sequence[float], ours: Sequence[float], *, paired: bool = False) -> str:
    """Say whether our figures equal those of the authors' code.

    They are equal if the means are within two standard errors of their difference; `paired` says
    that both sides have the same splits, of which those that both have are compared one by one.

    >>> compare([98.2, 98.3], [98.3, 98.4])
    "equal to the authors' code: 98.35 against 98.25, and two standard errors are 0.14 points"
    >>> compare([90.0, 95.0, 80.0], [89.0, 94.0, 79.0], paired=True)
    "differs by -1.00 points from the authors' code: 87.33 against 88.33, and two standard errors\
 are 0.00 points"
    """
    if not authors:
        return "protocol unknown: no run of the authors' code to compare with"
    if paired:
        authors, ours = zip(*zip(authors, ours, strict=False), strict=True)
    difference = fmean(ours) - fmean(authors)
    if min(len(authors), len(ours)) < 2:
        return (
            f"{difference:+.2f} points from the authors' code in one training, which is too few to"
            " say more"
        )
    if paired:
        variances = [variance([x - y for x, y in zip(ours, authors, strict=True)]) / len(ours)]
    else:
        variances = [variance(values) / len(values) for values in (authors, ours)]
    bound = STANDARD_ERRORS * math.sqrt(sum(variances))
    means = f"{fmean(ours):.2f} against {fmean(authors):.2f}"
    if abs(difference) <= bound + 1e-9:  # the rounding of a mean
        return (
            f"equal to the authors' code: {means}, and two standard errors are {bound:.2f} points"
        )
    return (
        f"differs by {difference:+.2f} points from the authors' code: {means}, and two standard"
        f" errors are {bound:.2f} points"
    )


def read_paper(name: str) -> tuple[str, Paper]:
    """Return a paper's name and its settings, checked: one of configs/papers/, or a YAML file."""
    from pydantic import TypeAdapter, ValidationError

    known, path = papers(), Path(name)
    if name not in known and not path.is_file():
        raise FusionZooError(
            f"unknown paper {name!r}.{did_you_mean(name, known)} `{command_line('reproduce')}`"
            f" lists all {len(known)}; or name a YAML file like those in configs/papers/"
        )
    path = known.get(name, path)
    try:
        paper: Paper = TypeAdapter(Paper).validate_python(read_yaml(path))
    except ValidationError as error:
        raise FusionZooError(f"{path}: {first_problem(error)}") from None
    if not paper.files:
        raise FusionZooError(f"{path}: files: name at least one data file")
    with located(f"{path}: run"):
        run_settings(paper, Path())
    return path.stem, paper


def run_settings(paper: Paper, folder: Path, seed: int = 0) -> RunConfig:
    """Return the settings of a training on the files in `folder`."""
    data = dict(paper.run.get("data", {}))
    data["root"] = str(folder / data.get("root", paper.files[0].name))
    if paper.repeat == "split":
        data["random_splits"] = seed
    return from_tree(RunConfig, {**paper.run, "data": data, "seed": seed})


def check_files(paper: Paper, folder: Path) -> None:
    """Refuse a data file that is not there, or whose bytes are not those of the paper's file."""
    for wanted in paper.files:
        path, licence = folder / wanted.name, f"licence: {wanted.licence}"
        if not path.is_file():
            raise FusionZooError(
                f"no {wanted.name} in {folder}: get it from {wanted.link} ({licence}), and name its"
                " folder with --data"
            )
        if (digest := sha256_of(path)) != wanted.sha256:
            raise FusionZooError(
                f"{path} is not the paper's file: its sha256 is {digest}, expected is"
                f" {wanted.sha256}; get it from {wanted.link} ({licence})"
            )


@keyword_errors
def reproduce(
    name: str | os.PathLike[str],
    data: str | os.PathLike[str] = ".",
    *,
    seeds: int | None = None,
    out: str | os.PathLike[str] = "",
    device: str = "auto",
) -> Reproduction:
    """Train as a paper did: `reproduce("tmc-handwritten", "~/Downloads", seeds=5).verdict`.

    `data` is the folder with the paper's files, whose sha256 is checked; `seeds` is the number of
    trainings, by default as many as there are of the authors' code, or 5. Each seed is a run folder
    `<out>/seed-<n>`; the same call goes on where one stopped, and trains no finished seed again.
    Writes `<out>/results.json`. `fusionzoo reproduce` lists the papers; figures are per cent.
    """
    tree = {"name": os.fspath(name), "data": os.fspath(data), "seeds": seeds, "device": device}
    return run_paper(from_tree(ReproduceConfig, {**tree, "out": os.fspath(out)}))


def run_paper(cfg: ReproduceConfig) -> Reproduction:
    """Check the data, train every seed that is not finished, and write results.json."""
    name, paper = read_paper(cfg.name)
    folder = Path(cfg.data).expanduser()
    check_files(paper, folder)
    out = Path(cfg.out or f"runs/{name}")
    _claim(out, paper)
    values: list[float] = []
    theirs = paper.authors.values if paper.authors else range(SEEDS)
    for seed in range(cfg.seeds or len(theirs)):
        settings = replace(run_settings(paper, folder, seed), device=cfg.device)
        metrics, exit_code = _train_seed(settings, out / f"seed-{seed}")
        if exit_code:
            return Reproduction(name=name, paper=paper, values=tuple(values), exit_code=exit_code)
        if paper.metric not in metrics["test"]:
            raise FusionZooError(
                f"metric {paper.metric!r} is not among those of the test split:"
                f" {', '.join(metrics['test'])}"
            )
        values.append(100 * metrics["test"][paper.metric])
    done = Reproduction(name=name, paper=paper, values=tuple(values))
    write_json(out / RESULTS, done.to_dict())
    return done


def _claim(out: Path, paper: Paper) -> None:
    """Refuse a folder with runs of other settings or data, whose figures would be mixed up."""
    files = {file.name: file.sha256 for file in paper.files}
    protocol = {"run": paper.run, "repeat": paper.repeat, "files": files}
    path = out / PROTOCOL
    stored = read_yaml(path) if path.is_file() else None  # JSON is YAML
    if stored is not None and stored != protocol:
        raise FusionZooError(
            f"{out} holds runs with other settings or data ({path}): name another --out"
        )
    write_json(path, protocol)


def _train_seed(cfg: RunConfig, folder: Path) -> tuple[Mapping[str, Any], int]:
    """Return a seed's metrics, trained unless it is finished, and the exit code of a training."""
    from fusionzoo.machine.distributed import process_group
    from fusionzoo.machine.memory import keep_freed_memory
    from fusionzoo.training.report import Run

    finished = Run(folder).metrics
    if finished:
        return finished, 0
    keep_freed_memory()
    with process_group(cfg.dist, cfg.device) as world:
        run = train(replace(cfg, out=str(folder), resume="auto"), world)
    return run.metrics, run.exit_code


def reproduce_command(args: Sequence[str]) -> int:
    """Run `fusionzoo reproduce NAME ...`; return its exit code."""
    return run_command(ReproduceConfig, USAGE, args, _start)


def _start(cfg: ReproduceConfig) -> int:
    if not cfg.name:
        _list_papers()
        return 0
    done = run_paper(cfg)
    if done.exit_code:
        print("stopped; the same command goes on")
    else:
        print_reproduction(done)
        print(f"wrote {Path(cfg.out or f'runs/{done.name}') / RESULTS}")
    return done.exit_code


def _list_papers() -> None:
    rows = []
    for name in papers():
        paper = read_paper(name)[1]
        published = f"{paper.metric} {_with_spread(paper.published)}"
        rows.append((name, paper.title, f"{paper.paper.year}", published, paper.files[0].name))
    header = ("name", "data x fusion", "year", "published, %", "its file, for --data")
    print_table("Papers", header, rows)


def print_reproduction(done: Reproduction) -> None:
    """Print the table of figures, what differs, and the verdict."""
    paper, (low, high) = done.paper, done.interval
    interval = "-" if math.isnan(low) else f"{low:.2f} to {high:.2f}"
    theirs = None if paper.authors is None else paper.authors.figures
    rows = [("published", _with_spread(paper.published), "-", _runs(paper.published))]
    if theirs is not None:
        rows.append(("authors' code, run by us", _with_spread(theirs), "-", _runs(theirs)))
    rows.append(("fusionzoo", _with_spread(done.ours), interval, _runs(done.ours)))
    title = f"{paper.title}: {paper.metric} in %, epoch: {paper.epoch}"
    print_table(title, ("figure", "mean ± sd", "95 % interval", "runs"), rows)
    print(f"{paper.paper.citation} {paper.paper.year}, {paper.paper.link}")
    print(f"authors' code: {paper.code.repository} at {paper.code.commit[:7]}")
    for line in paper.differs:
        print(f"what differs: {line}")
    print(done.verdict)


def _with_spread(figures: PaperFigures | None) -> str:
    if figures is None:
        return "-"
    spread = "" if figures.spread is None else f" ± {figures.spread:.2f}"
    return f"{figures.mean:.2f}{spread}"


def _runs(figures: PaperFigures | None) -> str:
    return "-" if figures is None or figures.runs is None else str(figures.runs)
