"""Write embeddings: `python embed.py --model runs/digits --split test --out emb.parquet`.

One row per sample, in the order of the data: id, split, target, present_<modality>, readable,
fused, and each modality's own vector. Without --model, of pretrained encoders alone: `--data.name
stamps --encoders.image.name timm/resnet18 --encoders.text.name hf/... --fusion.name concat`.
The same command goes on where a killed one stopped; under torchrun all processes share the work.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.config import EmbedConfig
from fusionzoo.config.load import Usage, run_command
from fusionzoo.errors import FusionZooError
from fusionzoo.zoo.cards import show_data_settings

if TYPE_CHECKING:
    from fusionzoo.datasets.opening.spec import DataSpec
    from fusionzoo.distributed import World
    from fusionzoo.embeddings.extract import Extraction
    from fusionzoo.embeddings.parts import PartsFolder
    from fusionzoo.model import FusionModel


USAGE = Usage(
    name="embed",
    purpose="Write embeddings: a row per sample with the fused vector and each modality's own.",
    words=("model", "data"),
    examples=(
        "runs/a my.csv --out my.parquet",
        "runs/a --split test --probabilities",
        "my.csv --encoders.text hf/intfloat/e5-small-v2 --out my.parquet",
    ),
    common=(
        *("model", "data", "split", "out", "encoders", "fusion", "dtype", "normalise"),
        *("probabilities", "batch_size"),
    ),
    more="The same command goes on where a killed one stopped; under torchrun all processes share"
    " the work.",
    show_details=show_data_settings,
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after a user's mistake."""
    args = sys.argv[1:] if args is None else args

    def start(cfg: EmbedConfig) -> int:
        from fusionzoo.distributed import launch_or_join

        def work(world: World) -> int:
            embed(cfg, world)
            return 0

        return launch_or_join(cfg.dist, cfg.device, work, script=__file__, args=args)

    interrupted = "stopped; the same command goes on from here"
    return run_command(EmbedConfig, USAGE, args, start, interrupted=interrupted)


def embed(
    cfg: EmbedConfig,
    world: World,
    model: FusionModel | None = None,
    data: DataSpec | None = None,
) -> Path:
    """Embed the data, together with the other processes of `world`; return the file.

    `model` and `data` replace those that `cfg` names.
    """
    from fusionzoo.distributed import gather
    from fusionzoo.embeddings.extract import Extraction, untrained_prefixes
    from fusionzoo.embeddings.files import check_out
    from fusionzoo.embeddings.open import open_model_and_data
    from fusionzoo.embeddings.parts import PartsFolder, merge
    from fusionzoo.plugins import load_plugins
    from fusionzoo.training.loaders import num_workers
    from fusionzoo.training.report import report_failures
    from fusionzoo.training.tracker import Tracker

    out = Path(cfg.out)
    load_plugins(cfg.plugins)  # one may hold the format of the file
    check_out(out)
    if cfg.engine == "ray" and world.size > 1:
        raise FusionZooError("--engine ray starts its own processes: leave torchrun out")
    objects = (model, data)
    model, rows, settings = open_model_and_data(cfg, world, *objects)
    parts = PartsFolder(out)
    job = Extraction.of(cfg, settings, model, rows, num_workers(cfg.num_workers, world))
    if sizes := untrained_prefixes(job.wanted, model):
        print(f"warning: the model was not trained with --matryoshka {','.join(map(str, sizes))}")
    with claimed(parts, job, cfg, world) as pending:
        with progress(job, parts, pending, world) as (advance, say):
            if cfg.engine == "ray":
                from fusionzoo.embeddings.on_ray import extract_on_ray

                extract_on_ray(cfg, job, pending, objects, advance)
            else:
                compute_share(job, parts, pending, world, advance, say)
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
    from fusionzoo.distributed import from_main

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


def compute_share(
    job: Extraction,
    parts: PartsFolder,
    pending: Sequence[int],
    world: World,
    advance: Callable[[int], Any],
    say: Callable[[str], None],
) -> None:
    """Compute this process's share of the parts."""
    from fusionzoo.embeddings.extract import extract

    extract(job, parts, pending[world.rank :: world.size], advance=advance, say=say)


@contextmanager
def progress(
    job: Extraction, parts: PartsFolder, pending: Sequence[int], world: World
) -> Iterator[tuple[Callable[[int], Any], Callable[[str], None]]]:
    """Show rows, rate and time left on process 0; yield functions to advance and to print.

    The other processes are taken to be as fast as this one.
    """
    from fusionzoo.progress import progress_bar

    left = sum(len(job.plan.rows(part)) for part in pending)
    total = len(job.dataset)
    if left < total and world.main:
        print(f"{parts.folder} holds {total - left} of {total} rows: going on from there")
    bar = progress_bar(total=total, initial=total - left, unit="row", disable=not world.main)
    with bar:
        yield lambda rows: bar.update(min(rows * world.size, total - bar.n)), bar.write


if __name__ == "__main__":
    from fusionzoo.processes import exit_process

    exit_process(main())
