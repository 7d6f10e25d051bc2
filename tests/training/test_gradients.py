"""N processes learn what one process learns, whatever rows and modalities each of them lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fusionzoo.config import DistConfig, RunConfig, from_tree
from fusionzoo.machine.distributed import World, process_group, wrap
from fusionzoo.structures import Batch
from fusionzoo.training.objective import Objective
from fusionzoo.training.trainer import Trainer
from helpers import ranks
from helpers.strategies import ROWS, make_batch, make_model, make_objective, take

ABSENT = {
    "nothing": [],
    # With two processes, rank 1 takes the odd rows: it then sees no audio at all.
    "a whole modality on one rank": [(row, 2) for row in range(1, ROWS, 2)],
    "a modality everywhere": [(row, 1) for row in range(ROWS)],
    "something here and there": [(0, 0), (1, 2), (2, 2), (5, 0), (5, 1), (6, 0), (6, 1), (6, 2)],
}


def objective_of(fusion: str) -> Objective:
    return make_objective(model=make_model(fusion))


def learn_once(objective: Objective, batches: list[Batch], world: World) -> dict[str, torch.Tensor]:
    """Make one step of plain gradient descent at rate 1: the change is the gradient."""
    before = {name: p.detach().clone() for name, p in objective.named_parameters()}
    cfg = from_tree(RunConfig, {"optim": {"clip": None}})
    trainable = [p for p in objective.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1.0)
    Trainer(wrap(objective, DistConfig(), world), optimizer, cfg, world).step(batches)
    return {name: before[name] - p.detach() for name, p in objective.named_parameters()}


RUNS = [(fusion, case, 1) for fusion in ("concat", "tmc", "mbt", "shaspec") for case in ABSENT]
RUNS.append(("gmu", "nothing", 2))


def learn_in_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    cfg = DistConfig(init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=60)
    with process_group(cfg, "cpu") as world:
        for number, (fusion, case, accumulate) in enumerate(RUNS):
            own = take(make_batch(ABSENT[case]), slice(rank, None, 2))
            parts = [take(own, slice(i, None, accumulate)) for i in range(accumulate)]
            found = learn_once(objective_of(fusion), parts, world)
            torch.save(found, f"{folder}/{rank}-{number}")


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes learnt: `<rank>-<run>`."""
    folder = tmp_path_factory.mktemp("two")
    ranks.run(__file__, 2, folder)
    return folder


@pytest.mark.parametrize("number", range(len(RUNS)), ids=["-".join(map(str, run)) for run in RUNS])
def test_two_processes_have_the_gradients_of_one_with_the_whole_batch(
    number: int, learned: Path
) -> None:
    fusion, case, _ = RUNS[number]
    wanted = learn_once(objective_of(fusion), [make_batch(ABSENT[case])], World())
    for rank in range(2):
        found = torch.load(learned / f"{rank}-{number}", weights_only=True)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted.values())


def test_absent_modalities_leave_their_encoders_alone_and_no_rows_everything() -> None:
    batch = make_batch(ABSENT["a modality everywhere"])
    gradients = learn_once(objective_of("concat"), [batch], World())
    text = [g for name, g in gradients.items() if "encoders.text" in name]
    assert text
    assert all((g == 0).all() for g in text)
    gradients = learn_once(objective_of("gmu"), [take(make_batch([]), slice(0, 0))], World())
    assert all(torch.isfinite(g).all() and (g == 0).all() for g in gradients.values())


if __name__ == "__main__":
    learn_in_process(int(sys.argv[1]), sys.argv[2])
