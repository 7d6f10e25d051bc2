"""Two processes learn what one process learns from the joined batches: a check of strategies.

Runs as a program too, `python -m fusionzoo.zoo.conformance.two_processes RANK FOLDER`: one of the
two processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from fusionzoo.config import DistConfig
from fusionzoo.distributed.process_group import World, process_group

from .short_run import EPOCH_STEPS, ShortRun, State, Strategy, assert_equal

STEPS = EPOCH_STEPS + 1  # the second epoch begins within
# Without Adam, which makes large steps of gradients that are all rounding.
CONFIG = {"optim": {"name": "sgd", "lr": 0.1}}
TIMEOUT = 300.0  # seconds


def two_processes_learn_what_one_does(strategy: Strategy) -> None:
    """Tried: three steps on two processes (gloo) and on one; weights and state to 1e-6."""
    expected = learn(strategy, World())
    with tempfile.TemporaryDirectory() as folder:
        for rank, states in enumerate(learn_in_two([strategy], Path(folder))):
            assert_equal(states[0], expected, f"process {rank} of two", tolerance=1e-6)


def learn(strategy: Strategy, world: World) -> State:
    """Return the state after some steps."""
    return ShortRun(strategy, world=world, config=CONFIG).steps(0, STEPS).state()


def learn_in_two(strategies: Sequence[Strategy], folder: Path) -> list[list[State]]:
    """Train each strategy in two processes; return its state in each of them."""
    (folder / "strategies.json").write_text(json.dumps([asdict(x) for x in strategies]))
    command = [sys.executable, "-P", "-m", __name__]
    logs = [folder / f"{rank}.log" for rank in range(2)]
    with logs[0].open("w") as first, logs[1].open("w") as second:
        processes = [
            subprocess.Popen([*command, str(rank), str(folder)], stdout=log, stderr=log)
            for rank, log in enumerate((first, second))
        ]
        try:
            codes = [process.wait(timeout=TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
    last = [(log.read_text().splitlines() or [""])[-1] for log in logs]
    assert codes == [0, 0], "; ".join(f"process {rank}: {line}" for rank, line in enumerate(last))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def main(rank: int, folder: Path) -> None:
    """Be one of two processes."""
    torch.set_num_threads(1)
    strategies = [Strategy(**x) for x in json.loads((folder / "strategies.json").read_text())]
    meet = DistConfig(init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=60)
    with process_group(meet, "cpu") as world:
        torch.save([learn(strategy, world) for strategy in strategies], folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
