"""Write fused embeddings: `python embed.py --model runs/digits --split test --out emb.parquet`.

One row per sample: id, split, target, present_<modality>, fused, and each modality's own embedding.
Started by torchrun, each of N processes writes its own share: emb-0-of-N.parquet, ...
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.config import EmbedConfig, merge, read_yaml
from fusionzoo.config.command import run_command
from fusionzoo.errors import FusionZooError
from fusionzoo.version import __version__

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from fusionzoo.datasets import PairedDataset
    from fusionzoo.distributed.process_group import World
    from fusionzoo.model import FusionModel
    from fusionzoo.structures import Batch


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after a user's mistake."""
    args = sys.argv[1:] if args is None else args

    def start(cfg: EmbedConfig) -> int:
        from fusionzoo.distributed.launch import launch_or_join

        def work(world: World) -> int:
            embed(cfg, world)
            return 0

        return launch_or_join(cfg.dist, cfg.device, work, script=__file__, args=args)

    return run_command(EmbedConfig, __doc__ or "", args, start)


def embed(
    cfg: EmbedConfig,
    world: World,
    model: FusionModel | None = None,
    dataset: PairedDataset | None = None,
) -> Path:
    """Embed this process's share of the data; return the file it wrote.

    `model` and `dataset` replace those that `cfg` names.
    """
    from tqdm import tqdm

    from fusionzoo.evaluation.embeddings import EmbeddingWriter
    from fusionzoo.loading import load
    from fusionzoo.plugins import load_plugins
    from fusionzoo.training.runs.report import report_failures
    from fusionzoo.training.runs.speed.inference import choose_for_inference
    from fusionzoo.training.runs.tracker import Tracker

    if not cfg.model and model is None:
        raise FusionZooError("--model is missing: a model folder, or a run folder such as runs/a")
    load_plugins(cfg.plugins)
    model = load(cfg.model, world.device) if model is None else model.to(world.device)
    # Labels are written as they stand, so only plain classes are read.
    targets: dict[str, str] | None = None if model.targets is None else {}
    dataset, settings = open_data(cfg, list(model.modalities), targets, dataset)
    speed = choose_for_inference(cfg, model, dataset, cfg.out, world)
    cfg = replace(cfg, batch_size=speed.batch_size, num_workers=speed.num_workers)
    loader, num_samples = build_loader(cfg, world, model, dataset)
    Tracker(world).say(*speed.notes)
    about = {"model": cfg.model, "data": settings, "split": cfg.split, **versions()}
    out = share_of(Path(cfg.out), world.rank, world.size)
    # Whole columns, read once: a lookup in each batch would cost time in proportion to all rows.
    row_of = {key: row for row, key in enumerate(dataset.ids)}
    labels, splits = dataset.labels, dataset.split_names
    progress = tqdm(total=num_samples, unit="sample", disable=not world.main, dynamic_ncols=True)
    with progress, EmbeddingWriter(out, list(model.modalities), about) as writer:
        for batch in loader:
            rows = [row_of[key] for key in batch.ids]
            with speed.autocast(world.device):
                vectors = model.embed(batch)
            writer.add(
                batch.ids,
                [splits[row] for row in rows],
                [labels[row] for row in rows],
                batch.present,
                vectors,
            )
            progress.update(len(rows))
    print(f"wrote {writer.rows} rows to {out}")
    report_failures(dataset, Tracker(world))
    return out


def build_loader(
    cfg: EmbedConfig, world: World, model: FusionModel, dataset: PairedDataset
) -> tuple[DataLoader[Batch], int]:
    """Build the loader of this process's share, and return the number of its samples."""
    from torch.utils.data import DataLoader

    from fusionzoo.datasets import PairedBatchSampler, make_sampler
    from fusionzoo.training.data import num_workers

    shard = (world.rank, world.size)
    sampler = make_sampler(dataset, shuffle=False, distributed=shard, pad=False)
    loader: DataLoader[Batch] = DataLoader(
        dataset,  # type: ignore[arg-type]
        # Similar lengths together: a short text does not wait for a long one.
        batch_sampler=PairedBatchSampler(sampler, cfg.batch_size, lengths=dataset.lengths()),
        collate_fn=model.collate(),
        num_workers=num_workers(cfg.num_workers, world),
    )
    return loader, len(sampler)


def open_data(
    cfg: EmbedConfig,
    modalities: list[str],
    targets: dict[str, str] | None,
    dataset: PairedDataset | None,
) -> tuple[PairedDataset, dict[str, Any]]:
    """Open the data set of the command line, else that of the run; keep what the model reads."""
    from fusionzoo.datasets import DATASETS
    from fusionzoo.encoders.augment import refuse_augmentation
    from fusionzoo.training.build import open_dataset

    refuse_augmentation(cfg.data)
    recipe = Path(cfg.model) / "config.yaml"
    settings = dict(cfg.data)
    if not settings.get("name"):
        if not recipe.is_file():
            raise FusionZooError(
                f"{cfg.model} is no run folder, so --data.name must say what to embed"
            )
        run = read_yaml(recipe)
        settings = merge(run["data"], settings)
        if run.get("plugins") and settings["name"] not in DATASETS:
            raise FusionZooError(
                f"unknown data set {settings['name']!r}: the run was trained with --plugins"
                f" {run['plugins']}, which is not imported unless it is given here too"
            )
    dataset = open_dataset(settings, targets, dataset)
    if not set(modalities) & set(dataset.modalities):
        raise FusionZooError(
            f"the model reads {', '.join(modalities)}; the data has {', '.join(dataset.modalities)}"
        )
    return dataset if cfg.split == "all" else dataset.split(cfg.split), settings


def share_of(path: Path, rank: int, size: int) -> Path:
    """Return the file of one process: `emb.parquet`, or `emb-0-of-2.parquet`."""
    return path if size == 1 else path.with_name(f"{path.stem}-{rank}-of-{size}{path.suffix}")


def versions() -> dict[str, str]:
    """Return the versions that made the vectors."""
    import torch

    return {"fusionzoo": __version__, "torch": str(torch.__version__)}


if __name__ == "__main__":
    sys.exit(main())
