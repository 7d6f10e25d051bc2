"""Train a fusion model: `python train.py --config configs/stamps.yaml --fusion.name mbt`.

The command line, and what a training is; its steps are in fusionzoo/training/run.py.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder: its `datasets` would hide Hugging Face's

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusionzoo.config import RunConfig
from fusionzoo.config.load import Usage, run_command
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.inputs.command import complete_run
from fusionzoo.plugins import load_plugins
from fusionzoo.processes import stopping
from fusionzoo.zoo.cards import show_data_settings

if TYPE_CHECKING:
    from fusionzoo.distributed import World
    from fusionzoo.training.report import Run


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
        load_plugins(cfg.plugins)
        cfg, data = complete_run(cfg)  # before torch is imported, which takes a second
        from fusionzoo.distributed import launch_or_join

        def work(world: World) -> int:
            return train(cfg, world, data).exit_code

        return launch_or_join(cfg.dist, cfg.device, work, script=__file__, args=args)

    goes_on = "the same command goes on, with --resume auto and the run's folder as --out"
    with stopping(goes_on):  # before and after the epochs
        return run_command(RunConfig, USAGE, args, start, interrupted=f"stopped: {goes_on}")


def train(cfg: RunConfig, world: World, data: DataSpec | None = None) -> Run:
    """Train, test, save; a signal ends the run after a whole step (`Run.exit_code` says so)."""
    from fusionzoo.training import presets, run
    from fusionzoo.training.build import with_linear_skip
    from fusionzoo.training.fit import check_last
    from fusionzoo.training.seeds import check_seeds
    from fusionzoo.training.tracker import Tracker

    load_plugins(cfg.plugins)
    tracker = Tracker(world)
    tracker.is_late(cfg.train.time_limit)  # raises an error if that is no time
    cfg, dataset = run.open_data(cfg, data, tracker)
    cfg, choices = presets.resolve(cfg, dataset, world)
    cfg, notes = with_linear_skip(cfg)
    tracker.say(*choices, *notes)
    check_seeds(cfg)
    check_last(cfg)
    if cfg.train.trials > 1 or cfg.train.seeds > 1:
        return run.train_several(cfg, world, dataset, tracker, choices)
    return run.train_once(cfg, world, dataset, tracker, choices)


if __name__ == "__main__":
    from fusionzoo.processes import exit_process

    exit_process(main())
