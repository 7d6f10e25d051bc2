"""One process, two and three, equal shares or not, DDP or FSDP: the same losses and weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fusionzoo.config import DistConfig, RunConfig, from_tree
from fusionzoo.distributed import World, process_group, wrap
from fusionzoo.model import UnimodalHeads, create_model
from fusionzoo.structures import Batch
from fusionzoo.training import checkpoint, run_folder
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.trainer import Trainer
from helpers import ranks

pytestmark = pytest.mark.slow
WIDTHS = {"image": 5, "text": 7, "audio": 3}
ROWS, CLASSES, STEPS = 8, 4, 20
SHARES = {1: [8], 2: [4, 4], 3: [4, 3, 1]}
CFG = {"optim": {"lr": 0.01, "modality_lr": {"text": 0.002}}, "train": {"ema": 0.9}}


def make_objective(fusion: str) -> Objective:
    torch.manual_seed(0)
    encoders = {
        name: {"name": "vector/mlp", "in_dim": width, "dim": 6, "dropout": 0.0}
        for name, width in WIDTHS.items()
    }
    model = create_model({"name": fusion, "dim": 8}, encoders, CLASSES)
    heads = UnimodalHeads(dict.fromkeys(WIDTHS, 6), 8, torch.full((CLASSES,), 1 / CLASSES))
    objective = Objective(model, heads)
    freeze_unused(objective)
    for module in objective.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return objective.double()  # Adam would blow up what float32 rounds


def make_batch(step: int) -> Batch:
    """30 % of each modality missing; the last three rows, a rank's or part of it, lack audio."""
    draw = torch.Generator().manual_seed(step)
    present = torch.rand(ROWS, len(WIDTHS), generator=draw) > 0.3
    present[4:, 2] = False
    inputs = {
        name: {"values": torch.randn(ROWS, width, generator=draw).double()}
        for name, width in WIDTHS.items()
    }
    target = inputs["image"]["values"][:, :CLASSES].argmax(1)
    return Batch([f"{step}/{row}" for row in range(ROWS)], inputs, present, target)


def learn(fusion: str, strategy: str, world: World, folder: Path) -> None:
    """Make the steps; save the losses, and a checkpoint as train.py would."""
    cfg = from_tree(RunConfig, {**CFG, "dist": {"strategy": strategy}})
    objective = make_objective(fusion)
    wrapped = wrap(objective, cfg.dist, world)
    groups = param_groups(objective.model, objective.heads, cfg.optim)
    trainer = Trainer(wrapped, build_optimizer(groups, cfg.optim), cfg, world)
    shares = SHARES[world.size]
    own = torch.arange(ROWS).split(shares)[world.rank]
    results = [trainer.step([make_batch(step).take(own)]) for step in range(STEPS)]
    losses = [trainer.mean_loss(result.loss) for result in results]
    name = f"{fusion}-{strategy}-{world.size}"
    checkpoint.save(folder / f"{name}.pt", trainer, checkpoint.State(step=STEPS))
    if world.main:
        torch.save(losses, folder / f"{name}-losses")
    # What was saved whole can be shared out again, and goes on.
    state, _ = checkpoint.restore(folder / f"{name}.pt", trainer)
    checkpoint.save(folder / f"{name}-again.pt", trainer, state)


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
