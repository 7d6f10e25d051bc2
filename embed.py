"""Write fused embeddings: `python embed.py --model runs/digits --split test --out emb.parquet`.

One row per sample: id, split, target, present_<modality>, fused, and each modality's own embedding.
Started by torchrun, each of N processes writes its own share: emb-0-of-N.parquet, ...
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.config import EmbedConfig, merge, read_yaml
from fusionzoo.config.command import run_command
from fusionzoo.errors import FusionZooError

if TYPE_CHECKING:
    from fusionzoo.datasets import PairedDataset
    from fusionzoo.distributed.process_group import World


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


def embed(cfg: EmbedConfig, world: World) -> Path:
    """Embed this process's share of the data; return the file it wrote."""
    from torch.utils.data import DataLoader
    from tqdm import tqdm

    from fusionzoo.datasets import PairedBatchSampler, make_sampler
    from fusionzoo.evaluation.embeddings import EmbeddingWriter
    from fusionzoo.model import load
    from fusionzoo.training.data import num_workers
    from fusionzoo.training.runs.report import report_failures
    from fusionzoo.training.runs.tracker import Tracker

    if not cfg.model:
        raise FusionZooError("--model is missing: a model folder, or a run folder such as runs/a")
    model = load(cfg.model, world.device)
    # Labels are written as they stand, so only plain classes are read.
    targets: dict[str, str] | None = None if model.targets is None else {}
    dataset, settings = open_data(cfg, list(model.modalities), targets)
    shard = (world.rank, world.size)
    sampler = make_sampler(dataset, shuffle=False, distributed=shard, pad=False)
    loader = DataLoader(
        dataset,
        # Similar lengths together: a short text does not wait for a long one.
        batch_sampler=PairedBatchSampler(sampler, cfg.batch_size, lengths=dataset.lengths()),
        collate_fn=model.collate(),
        num_workers=num_workers(cfg.num_workers, world),
    )
    about = {"model": cfg.model, "data": settings, "split": cfg.split, **versions()}
    out = share_of(Path(cfg.out), *shard)
    # Whole columns, read once: a lookup in each batch would cost time in proportion to all rows.
    row_of = {key: row for row, key in enumerate(dataset.ids)}
    labels, splits = dataset.labels, dataset.split_names
    progress = tqdm(total=len(sampler), unit="sample", disable=not world.main, dynamic_ncols=True)
    with progress, EmbeddingWriter(out, list(model.modalities), about) as writer:
        for batch in loader:
            rows = [row_of[key] for key in batch.ids]
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


def open_data(
    cfg: EmbedConfig, modalities: list[str], targets: dict[str, str] | None
) -> tuple[PairedDataset, dict[str, Any]]:
    """Open the data set of the command line, else that of the run; keep what the model reads."""
    from fusionzoo.training.build import open_dataset

    recipe = Path(cfg.model) / "config.yaml"
    settings = dict(cfg.data)
    if not settings.get("name"):
        if not recipe.is_file():
            raise FusionZooError(
                f"{cfg.model} is no run folder, so --data.name must say what to embed"
            )
        settings = merge(read_yaml(recipe)["data"], settings)
    dataset = open_dataset(settings, targets)
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

    import fusionzoo

    return {"fusionzoo": fusionzoo.__version__, "torch": str(torch.__version__)}


if __name__ == "__main__":
    sys.exit(main())
