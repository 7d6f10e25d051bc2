"""Every fusion trains from the command line, by its own loss, in its own phases, on any data."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.config import OptimConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, fusion_info, list_fusions
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch, Phase, StepContext
from fusionzoo.training.freezing import frozen_in_phase
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer
from helpers import ranks
from helpers.strategies import make_batch, make_model, make_objective, make_trainer

OWN_LOSS = [name for name in list_fusions() if fusion_info(name).cls.loss is not Fusion.loss]  # type: ignore[attr-defined]
FIRST_OF_FAMILY = ["gmu", "late_mean", "mbt", "misa"]
TWO = {"image": 5, "text": 7}
QUICK = ["--train.epochs", "1", "--log", "none"]


def check_run(out: Path) -> None:
    results = json.loads((out / "metrics.json").read_text())
    assert math.isfinite(results["train"]["loss"])
    assert 0 <= results["test"]["accuracy"] <= 1
    assert (out / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", list_fusions())
def test_every_fusion_trains_while_much_is_missing(name: str, tmp_path: Path) -> None:
    data = ["--data.name", "interactions", "--data.samples", "200", "--data.num_modalities", "3"]
    flags = [*data, "--data.missing", "0.3", "--fusion.dim", "32", "--fusion.name", name]
    assert train([*flags, *QUICK, "--out", str(tmp_path / "run")]) == 0
    check_run(tmp_path / "run")


TWO_PROCESSES = sorted({*OWN_LOSS, *FIRST_OF_FAMILY})


def train_in_process(rank: int, folder: str) -> None:
    """Train all of them, one after the other, as one of two processes."""
    torch.set_num_threads(1)
    data = ["--data.name", "interactions", "--data.samples", "400", "--data.num_modalities", "3"]
    for name in TWO_PROCESSES:
        meet = ["--dist.init_method", f"file://{folder}/meet-{name}", "--dist.timeout", "60"]
        meet += ["--dist.rank", str(rank), "--dist.world_size", "2"]
        flags = [*data, "--data.missing", "0.3", "--fusion.dim", "32", "--fusion.name", name]
        assert train([*flags, *meet, *QUICK, "--out", f"{folder}/{name}"]) == 0


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs that two processes made."""
    folder = tmp_path_factory.mktemp("two")
    ranks.run(__file__, 2, folder, timeout=500)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_every_loss_trains_on_two_processes_while_much_is_missing(
    name: str, two_processes: Path
) -> None:
    check_run(two_processes / name)


def trainer_of(name: str) -> Trainer:
    return make_trainer(make_objective(model=make_model(name, TWO)), {"optim": {"lr": 0.1}})


def batch_of() -> Batch:
    return make_batch([], TWO)


@pytest.mark.parametrize("name", ["late_stacking", "mmin"])
def test_what_rests_in_a_phase_does_not_move_by_momentum_or_decay_either(name: str) -> None:
    trainer = trainer_of(name)
    for _ in range(3):
        trainer.step([batch_of()], StepContext(phase=0))
    rest = frozen_in_phase(trainer.module.model, trainer.freeze_plan.phases[1])
    before = [p.detach().clone() for p in rest]
    others = [p for p in trainer.module.model.parameters() if all(p is not q for q in rest)]
    moving = [p.detach().clone() for p in others]
    for _ in range(3):
        trainer.step([batch_of()], StepContext(phase=1))
    assert rest
    assert all(torch.equal(p, q) for p, q in zip(rest, before, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(others, moving, strict=True))


def test_every_phase_gets_a_step_and_too_few_steps_are_refused() -> None:
    phases = [Phase("long", 0.98), Phase("short", 0.02)]
    at = phased(OptimConfig(warmup=0.0), phases, 4, 4)
    assert [at(step)[0] for step in range(4)] == [0, 0, 0, 1]
    assert at(3)[1] == {"": 1.0}  # with a schedule of its own
    with pytest.raises(FusionZooError, match="2 phases, and the run has only 1 steps"):
        phased(OptimConfig(), phases, 1, 1)


def test_a_phase_names_what_learns_and_encoders_that_rest_are_in_evaluation_mode() -> None:
    trainer = trainer_of("mmin")
    for phase in (1, 0):
        trainer.step([batch_of()], StepContext(phase=phase))
        modes = {module.training for module in trainer.module.model.encoders.modules()}
        assert modes == {phase == 0}
    model = trainer_of("gmu").module.model
    some = frozen_in_phase(model, Phase("gates", 1.0, trains=("gate",), encoders=False))
    learning = [n for n, p in model.named_parameters() if all(p is not q for q in some)]
    assert learning == ["fusion.gate.weight"]


def test_a_loss_sees_the_samples_numbers_and_remembers_them() -> None:
    trainer = trainer_of("qmf")
    memory: Any = trainer.module.memory
    memory.float()
    trainer.step([batch_of().take(torch.tensor([6, 2]))])
    total = memory.total
    assert (total[[6, 2]] > 0).all()
    assert (total[[0, 1, 3, 4, 5, *range(7, 12)]] == 0).all()
    assert "memory.total" in trainer.module.state_dict()
    assert not any("memory" in key for key in trainer.module.model.state_dict())


if __name__ == "__main__":
    train_in_process(int(sys.argv[1]), sys.argv[2])
