"""Train a fusion model, as fusionzoo/training/run.py does: `python train.py digits`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence

from fusionzoo.config import RunConfig
from fusionzoo.config.load import Usage, run_command
from fusionzoo.inputs.command import complete_run
from fusionzoo.machine.processes import stopping
from fusionzoo.zoo.cards import show_data_settings

USAGE = Usage(
    name="train",
    purpose="Train a fusion model: a file and the name of its target are enough.",
    words=("data",),
    examples=(
        "my.csv --target diagnosis",
        "my.csv --target diagnosis --preset fast",
        "digits --fusion gmu --train.epochs 5 --out runs/a",
        "--config stamps_finetune --train.time_limit 10m",
    ),
    common=(
        *("data", "target", "preset", "fusion", "encoders", "balance", "train.epochs"),
        *("train.time_limit", "optim.lr", "seed", "out", "resume"),
    ),
    show_details=show_data_settings,
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 2 after a user's mistake, 75 or 130 if stopped early."""
    args = sys.argv[1:] if args is None else args

    def start(cfg: RunConfig) -> int:
        cfg, data = complete_run(cfg)  # before torch is imported, which takes a second
        from fusionzoo.machine.distributed import World, launch_or_join
        from fusionzoo.training.run import train

        def work(world: World) -> int:
            return train(cfg, world, data).exit_code

        return launch_or_join(cfg.dist, cfg.device, work, script=__file__, args=args)

    goes_on = "the same command goes on, with --resume auto and the run's folder as --out"
    with stopping(goes_on):  # before and after the epochs
        return run_command(RunConfig, USAGE, args, start, interrupted=f"stopped: {goes_on}")


if __name__ == "__main__":
    from fusionzoo.machine.processes import exit_process

    exit_process(main())
