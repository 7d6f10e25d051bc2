"""CPU time of a training step on two processes of 16 samples against one process of 32.

`python perf/two_processes.py`. One thread each; CPU time, in interleaved rounds. `efficiency` is
the time of one process over the sum of the two; `of_half_batches` that over twice a step of 16
samples in one process without a group: what is lost because a step has a fixed cost, whatever its
batch. The rest is the price of DDP and gloo. `--parts` prints what the first of the two processes
spends its time on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from _timing import compare

STEPS, ROUNDS = 12, 5


def work(rank: int, size: int, meet: str, parts: bool, rows: int) -> None:
    """Train some steps as process `rank` of `size`; print the CPU seconds of a step."""
    import torch

    from fusionzoo.config import RunConfig, from_args
    from fusionzoo.distributed import process_group, wrap
    from fusionzoo.training.build import build_objective, choose_encoders, open_dataset
    from fusionzoo.training.optim import build_optimizer, param_groups
    from fusionzoo.training.trainer import Trainer

    torch.set_num_threads(1)
    flags = ["--dist.init_method", f"file://{meet}", "--dist.rank", str(rank)]
    flags += ["--dist.world_size", str(size)]
    cfg = from_args(RunConfig, flags)
    dataset = open_dataset(cfg.data).split("train")
    encoders = json.dumps(choose_encoders(dataset, cfg.encoders))
    cfg = from_args(RunConfig, [*flags, "--encoders", encoders])
    with process_group(cfg.dist, "cpu") as world:
        torch.manual_seed(0)
        objective, _ = build_objective(cfg, dataset, world)
        wrapped = wrap(objective, cfg.dist, world)
        groups = param_groups(objective.model, objective.heads, cfg.optim)
        trainer = Trainer(wrapped, build_optimizer(groups, cfg.optim), cfg, world)
        samples = [dataset[rank * rows + i] for i in range(rows)]
        batch = objective.model.collate(train=True)(samples)
        for _ in range(3):
            trainer.step([batch])
        start = time.process_time()
        for _ in range(STEPS):
            trainer.step([batch])
        seconds = (time.process_time() - start) / STEPS
        if parts:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                trainer.step([batch])
            if rank == 0 and size > 1:
                table = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=18)
                print(table, file=sys.stderr)
    print(seconds)


def total(size: int, rows: int, parts: bool = False) -> float:
    """Return the CPU seconds of a step with `rows` samples each, summed over the processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        settings = [str(size), f"{folder}/meet", str(int(parts)), str(rows)]
        command = [sys.executable, __file__, "work", *settings]
        running = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        return sum(float(one.communicate()[0].splitlines()[-1]) for one in running)


def main() -> None:
    """Print one JSON line."""
    if sys.argv[1:] == ["--parts"]:
        total(2, 16, parts=True)
        return
    rounds = [
        {"one": total(1, 32), "half": 2 * total(1, 16), "two": total(2, 16)} for _ in range(ROUNDS)
    ]
    one, half, two = ([times[name] for times in rounds] for name in ("one", "half", "two"))
    figures = {"efficiency": compare(one, two), "of_half_batches": compare(one, half)}
    print(json.dumps({"benchmark": "two_processes", **figures}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        _, _, size, meet, parts, rows, rank = sys.argv
        work(int(rank), int(size), meet, parts == "1", int(rows))
    else:
        main()
