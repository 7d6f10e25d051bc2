"""`fusionzoo report`: a run's results, printed or on one page with what the model gets wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionzoo.benchmark.report.page import require_packages
from fusionzoo.config import EvaluateConfig, read_yaml
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import Usage, run_command
from fusionzoo.config.schema import ModelUse, option
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError, keyword_errors, one_line
from fusionzoo.files import write_text
from fusionzoo.ground.console import print_table
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.html.samples import MAX_CHARACTERS, PLAYED, SIDE
from fusionzoo.html.template import template
from fusionzoo.inference import open_data, open_model, refuse_to_replace
from fusionzoo.inputs.data import Data, configure
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.training.gain import GAIN
from fusionzoo.training.report import Run, chosen_weights
from fusionzoo.zoo.cards import show_data_settings

from .mistakes import SplitAnswers
from .page import SAMPLES, about_answers, about_data, about_run, columns_of, notes

NAME = "report.html"  # of the page in the run's folder
USAGE = Usage(
    name="report",
    purpose="Show a run's results; with --html write a page with what its model gets wrong.",
    words=("model", "data"),
    examples=("runs/a", "runs/a --html", "runs/a moved.csv --html page.html"),
    common=("model", "data", "html", "split", "batch_size", "device"),
    more=f"The page is one file: data, curves, results, mistakes, the {SAMPLES} worst samples.",
    show_details=show_data_settings,
)


@dataclass(frozen=True, kw_only=True)
class ReportConfig(ModelUse):
    """Settings of `fusionzoo report`."""

    model: str = option("", "folder of a run of `fusionzoo train` (required)")
    data: Tree = option({}, "data set and its settings; empty = those of the training")
    split: str = option("test", "train | val | test | all, from which the samples come")
    html: str | bool = option("", f"page to write; without a value {NAME} in the run's folder")


@keyword_errors
def report(
    run: Run | str | Path, path: str | Path | None = None, *, data: Data = None, **settings: Any
) -> Path:
    """Write the page of a finished run: `report("runs/a")` writes `runs/a/report.html`.

    One file with the data, learning curves, results, mistakes, what each subset of the modalities
    reaches, and the worst samples. `data` are what `evaluate` takes; without them, those of the
    training. If these cannot be opened, the page says so and has no samples. Further settings are
    those of `fusionzoo report`: `split`, `batch_size`, `device`, ...
    """
    opened = open_run(run)
    named = {**settings, "model": str(opened.folder), "html": "" if path is None else str(path)}
    cfg, spec = configure(ReportConfig, data, named, store=False)
    return write_page(opened, cfg, spec)


def open_run(run: Run | str | Path) -> Run:
    """Return the run in a folder, with results; what is none is an error."""
    if not isinstance(run, Run):
        folder = Path(run)
        if not (folder / "config.yaml").is_file():
            is_model = (folder.parent / "config.yaml").is_file() and folder.name == "model"
            hint = f"; its run is {folder.parent}" if is_model else ""
            what = f"{folder} is no run folder" if folder.is_dir() else f"{folder} is not there"
            raise FusionZooError(f"{what}: name what `fusionzoo train` wrote, as runs/a{hint}")
        run = Run(folder)
    run.results()
    return run


def write_page(run: Run, cfg: ReportConfig, data: DataSpec | None) -> Path:
    """Write the page of a run, and return its path."""
    require_packages()
    load_plugins(cfg.plugins)
    path = run.folder / NAME if cfg.html in ("", True) else Path(str(cfg.html))
    use = EvaluateConfig.of(cfg, split="all", out=str(path))
    refuse_to_replace(read_yaml(run.folder / "config.yaml")["data"], str(path), "--html")
    model = open_model(use, run.model)
    opened, problem = _open(use, model, data)
    measured = None
    if opened is not None and (model.classes or model.targets):
        rows = opened if cfg.split == "all" else opened.split(cfg.split)
        measured = SplitAnswers.of(model, rows, use)
    if problem:
        print(f"note: the page shows no samples: {problem}")
    columns, is_test = columns_of(run), cfg.split == "test" and not cfg.data
    text = template("page.html", "fusionzoo.tools.run_report").render(
        **about_run(run, model),
        **about_data(columns, model, opened),
        **({} if measured is None else about_answers(columns, measured)),
        notes=list(notes(run, measured, problem, is_test=is_test)),
        split=cfg.split,
        limits=(SIDE, MAX_CHARACTERS, PLAYED),
    )
    write_text(path, text)
    return path


def _open(
    use: EvaluateConfig, model: FusionModel, data: DataSpec | None
) -> tuple[PairedDataset | None, str]:
    """Open the data; those of the training may be gone, then return why."""
    try:
        return open_data(use, model, data), ""
    except (FusionZooError, OSError) as error:
        if use.data or (data is not None and data.is_in_memory):
            raise
        return None, one_line(error)


def report_command(args: Sequence[str]) -> int:
    """Run `fusionzoo report RUN [DATA] ...`; return 0, or 2 after a user's mistake."""
    return run_command(ReportConfig, USAGE, args, _start)


def _start(cfg: ReportConfig) -> int:
    if not cfg.model:
        raise FusionZooError("the folder of a run is missing: fusionzoo report runs/a")
    run = open_run(cfg.model)
    if not cfg.html:
        if cfg.data:
            raise FusionZooError("data are for the page: add --html")
        print_table(f"Test split, {chosen_weights(run.metrics)}", *run.results())
        if GAIN in run.metrics:
            print(f"gain    {run.metrics[GAIN]['words']}")
        return 0
    print(f"wrote {write_page(run, cfg, None)}")
    return 0
