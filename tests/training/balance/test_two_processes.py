"""Two processes learn with every strategy what one process learns from the whole batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.config import DistConfig
from fusionzoo.machine.distributed import World, process_group
from fusionzoo.machine.fsdp import full_state_dict
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from helpers import ranks
from helpers.strategies import (
    make_batch,
    make_loaders,
    make_model,
    make_objective,
    make_trainer,
    save_teachers,
    take,
)

# With two processes, rank 1 takes the odd rows: it then sees no audio at all.
pytestmark = pytest.mark.slow
ABSENT = {
    "some": [(0, 0), (1, 2), (5, 0), (5, 1), (6, 1)],
    "rank": [(r, 2) for r in range(1, 12, 2)],
}
CASES = [(name, case) for name in BALANCE for case in ABSENT]
CASES += [("contrastive_align", mode) for mode in ("siglip", "imagebind")]
CASES += [("cggm", "direction")]
CASES += [(name, "fsdp") for name in BALANCE if BALANCE[name].cls.shards]  # type: ignore[attr-defined]


def learned(
    name: str, case: str, world: World, teachers: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Make four steps, the strategy's epoch beginning anew after two; uneven shares."""
    how: Any = case if case == "fsdp" and world.size > 1 else "ddp"
    settings = dict(teachers) if name == "umt" else {}
    settings |= {"mode": case} if case in ("siglip", "imagebind") else {}
    # One encoder is as wide as this fusion, so that cggm's loss of directions applies.
    model = make_model("mean", dim=6) if case == "direction" else make_model("mean")
    objective = make_objective(name, settings, world, model=model)
    if name == "gblend":
        objective.balance["gblend"].weights.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))  # type: ignore[union-attr, operator]
    trainer = make_trainer(objective, {"optim": {"name": "sgd", "lr": 0.1}}, world, how)
    batch = take(make_batch(ABSENT.get(case, ABSENT["some"])), slice(0, 11))
    for step in range(4):
        now = StepContext(step, step / 2)
        if step == 2 and name != "gblend":
            for one in objective.strategies(now):
                one.begin_epoch(trainer, make_loaders(), now)
        trainer.step([take(batch, slice(world.rank, None, world.size))], now)
    return {key: x.clone() for key, x in full_state_dict(objective).items()}


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    teachers = save_teachers(folder / str(rank))
    meet = DistConfig(init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=60)
    with process_group(meet, "cpu") as world:
        torch.save([learned(*case, world, teachers) for case in CASES], folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes learnt."""
    folder = tmp_path_factory.mktemp("two")
    ranks.run(__file__, 2, folder)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(case) for case in CASES])
def test_two_processes_learn_what_one_does(number: int, folder: Path) -> None:
    name, case = CASES[number]
    wanted = learned(name, case, World(), save_teachers(folder / "0"))
    for rank in range(2):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)[number]
        assert found.keys() == wanted.keys()
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
