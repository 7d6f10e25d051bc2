"""One process, two and three, equal shares or not, DDP or FSDP: the same losses and weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from fusionzoo.config import DistConfig
from fusionzoo.machine.distributed import World, process_group
from fusionzoo.training import checkpoint, run_folder
from helpers import ranks
from helpers.strategies import ROWS, make_batch, make_model, make_objective, make_trainer

pytestmark = pytest.mark.slow
STEPS = 20
SHARES = {1: [12], 2: [6, 6], 3: [6, 4, 2]}
CFG = {"optim": {"lr": 0.01, "modality_lr": {"text": 0.002}}, "train": {"ema": 0.9}}


def learn(fusion: str, strategy: Literal["ddp", "fsdp"], world: World, folder: Path) -> None:
    """Make the steps; save the losses, and a checkpoint as train.py would."""
    objective = make_objective(model=make_model(fusion))
    trainer = make_trainer(objective, CFG, world, strategy)
    own = torch.arange(ROWS).split(SHARES[world.size])[world.rank]
    results = [trainer.step([make_batch().take(own)]) for _ in range(STEPS)]
    losses = [trainer.mean_loss(result.loss) for result in results]
    name = f"{fusion}-{strategy}-{world.size}"
    checkpoint.save(folder / f"{name}.pt", trainer, checkpoint.State(step=STEPS))
    if world.main:
        torch.save(losses, folder / f"{name}-losses")
    # What was saved whole can be shared out again, and goes on.
    state, _ = checkpoint.restore(folder / f"{name}.pt", trainer)
    checkpoint.save(folder / f"{name}-again.pt", trainer, state)


CASES: list[tuple[str, Literal["ddp", "fsdp"]]]
CASES = [(fusion, strategy) for fusion in ("gmu", "mbt") for strategy in ("ddp", "fsdp")]


def learn_in_process(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet-{size}"
    cfg = DistConfig(init_method=meet, rank=rank, world_size=size, timeout=60)
    with process_group(cfg, "cpu") as world:
        for case in CASES:
            learn(*case, world, folder)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what one, two and three processes learnt."""
    folder = tmp_path_factory.mktemp("parallel")
    for size in (2, 3):
        ranks.run(__file__, size, size, folder)
    for fusion in {fusion for fusion, _ in CASES}:
        learn(fusion, "ddp", World(), folder)
    return folder


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("fusion", "strategy"), CASES)
def test_any_number_of_processes_learns_the_same(
    fusion: str, strategy: str, size: int, learned: Path
) -> None:
    one, many = f"{fusion}-ddp-1", f"{fusion}-{strategy}-{size}"
    wanted, found = (
        torch.load(learned / f"{name}-losses", weights_only=True) for name in (one, many)
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    assert sum(wanted[-5:]) < sum(wanted[:5])
    alone, together = (run_folder.read(learned / f"{name}.pt") for name in (one, many))
    for what in ("objective", "average"):
        torch.testing.assert_close(together[what], alone[what], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("fusion", "strategy"), CASES)
def test_a_checkpoint_is_whole_and_can_be_shared_out_again(
    fusion: str, strategy: str, size: int, learned: Path
) -> None:
    name = f"{fusion}-{strategy}-{size}"
    saved, again = (run_folder.read(learned / f"{name}{x}.pt") for x in ("", "-again"))
    for what in ("objective", "optimizer"):
        wanted, found = (one[what].get("state", one[what]) for one in (saved, again))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


if __name__ == "__main__":
    learn_in_process(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
