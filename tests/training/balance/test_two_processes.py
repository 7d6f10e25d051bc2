"""Two processes learn with every strategy what one process learns from the whole batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.config import DistConfig, RunConfig, from_tree
from fusionzoo.datasets import create_dataset
from fusionzoo.distributed import World, process_group, wrap
from fusionzoo.fsdp import full_state_dict
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.build import build_objective, choose_encoders
from fusionzoo.training.loaders import build_loader
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.trainer import Trainer
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


def blended(world: World) -> dict[str, torch.Tensor]:
    """Measure gblend's weights, on loaders whose batches are shared out."""
    data = create_dataset("interactions", samples=200, task="copy", missing=0.2)
    tree = {"balance": "gblend", "fusion": {"name": "mean", "dim": 8}, "optim": {"lr": 0.01}}
    cfg = from_tree(
        RunConfig,
        {**tree, "train": {"batch_size": 30 // world.size}, "encoders": choose_encoders(data, {})},
    )
    torch.manual_seed(0)
    objective, _ = build_objective(cfg, data.split("train"), world)
    objective.double()
    for module in objective.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    trainer = Trainer(
        wrap(objective, cfg.dist, world), build_optimizer(groups, cfg.optim), cfg, world
    )
    collate = objective.model.collate()

    def double(samples: Any) -> Any:
        batch = collate(samples)
        return batch._replace(
            inputs={m: {k: x.double() for k, x in own.items()} for m, own in batch.inputs.items()}
        )

    loaders = {
        part: build_loader(data.split(part), double, cfg, world, part) for part in ("train", "val")
    }
    before = {key: x.clone() for key, x in objective.state_dict().items()}
    state = torch.get_rng_state()
    objective.balance["gblend"].begin_epoch(trainer, loaders, StepContext())  # type: ignore[operator, union-attr]
    after = objective.state_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert not any(trainer.optimizer.state.values())
    for key, x in before.items():
        assert torch.equal(x, after[key]) or key.startswith("balance.gblend."), key
    return {"weights": after["balance.gblend.weights"].clone()}


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    teachers = save_teachers(folder / str(rank))
    meet = DistConfig(init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=60)
    with process_group(meet, "cpu") as world:
        found = [learned(name, case, world, teachers) for name, case in CASES]
        torch.save([*found, blended(world)], folder / f"{rank}.pt")


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


def test_gradient_blending_measures_the_same_weights(folder: Path) -> None:
    wanted = blended(World())["weights"]
    for rank in range(2):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)[-1]["weights"]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(wanted.sum(), torch.tensor(1.0).double())
    assert wanted.max() - wanted.min() > 0.01


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))
