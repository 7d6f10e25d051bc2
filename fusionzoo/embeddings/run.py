"""One extraction: open model and data, compute the parts, join them into one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fusionzoo.config import EmbedConfig
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.ground.progress import progress_bar
from fusionzoo.machine.distributed import World, from_main, gather
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.training.loaders import num_workers
from fusionzoo.training.report import report_failures
from fusionzoo.training.tracker import Tracker

from .extract import Extraction, extract, untrained_prefixes
from .files import check_out
from .open import open_model_and_data
from .parts import PartsFolder, merge


def embed(
    cfg: EmbedConfig,
    world: World,
    model: FusionModel | None = None,
    data: DataSpec | None = None,
) -> Path:
    """Embed the data, together with the other processes of `world`; return the file.

    `model` and `data` replace those that `cfg` names.
    """
    out = Path(cfg.out)
    load_plugins(cfg.plugins)  # one may hold the format of the file
    check_out(out)
    model, rows, settings = open_model_and_data(cfg, world, model, data)
    parts = PartsFolder(out)
    job = Extraction.of(cfg, settings, model, rows, num_workers(cfg.num_workers, world))
    if sizes := untrained_prefixes(job.wanted, model):
        print(f"warning: the model was not trained with --matryoshka {','.join(map(str, sizes))}")
    with claimed(parts, job, cfg, world) as pending:
        with progress(job, parts, pending, world) as (advance, say):
            share = pending[world.rank :: world.size]
            extract(job, parts, share, advance=advance, say=say)
        report_failures(rows, Tracker(world))
        gather(None, world)  # wait for the others' parts
        if world.main:
            merge(parts, job.schema, job.plan.num_parts)
            print(f"wrote {len(rows)} rows to {out}")
    return out


@contextmanager
def claimed(
    parts: PartsFolder, job: Extraction, cfg: EmbedConfig, world: World
) -> Iterator[list[int]]:
    """Lock the folder of parts for a block; yield the parts to compute, the same on all ranks."""
    problem, pending = None, []
    with ExitStack() as stack:
        if world.main:
            try:
                stack.enter_context(parts.claimed(job.key))
                pending = sorted({*range(job.plan.num_parts)} - {*parts.finished()})
            except (FusionZooError, OSError) as error:
                problem = str(error)
        problem, pending = from_main((problem, pending), world)
        if problem:
            raise FusionZooError(problem)
        parts.wait_until_visible()
        yield pending


@contextmanager
def progress(
    job: Extraction, parts: PartsFolder, pending: Sequence[int], world: World
) -> Iterator[tuple[Callable[[int], Any], Callable[[str], None]]]:
    """Show rows, rate and time left on process 0; yield functions to advance and to print.

    The other processes are taken to be as fast as this one.
    """
    left = sum(len(job.plan.rows(part)) for part in pending)
    total = len(job.dataset)
    if left < total and world.main:
        print(f"{parts.folder} holds {total - left} of {total} rows: going on from there")
    bar = progress_bar(total=total, initial=total - left, unit="row", disable=not world.main)
    with bar:
        yield lambda rows: bar.update(min(rows * world.size, total - bar.n)), bar.write
