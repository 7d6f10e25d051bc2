"""Write embeddings, as fusionzoo/embeddings/run.py does: `python embed.py runs/a my.csv`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence

from fusionzoo.config import EmbedConfig
from fusionzoo.config.load import Usage, run_command
from fusionzoo.zoo.cards import show_data_settings

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
        from fusionzoo.embeddings.run import embed
        from fusionzoo.machine.distributed import World, launch_or_join

        def work(world: World) -> int:
            embed(cfg, world)
            return 0

        return launch_or_join(cfg.dist, cfg.device, work, script=__file__, args=args)

    interrupted = "stopped; the same command goes on from here"
    return run_command(EmbedConfig, USAGE, args, start, interrupted=interrupted)


if __name__ == "__main__":
    from fusionzoo.machine.processes import exit_process

    exit_process(main())
