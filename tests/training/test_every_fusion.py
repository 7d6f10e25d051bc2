"""Every fusion trains from the command line, by its own loss, in its own phases, on any data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fusionzoo.config import OptimConfig, RunConfig, from_tree
from fusionzoo.distributed import World
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, fusion_info, list_fusions
from fusionzoo.model import UnimodalHeads, create_model
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch, Phase, StepContext
from fusionzoo.training.freezing import frozen_in_phase
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer

OWN_LOSS = [name for name in list_fusions() if fusion_info(name).cls.loss is not Fusion.loss]  # type: ignore[attr-defined]
FIRST_OF_FAMILY = ["gmu", "late_mean", "mbt", "misa"]
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


QUICK_SKIP = ("lmf", "late_mean", "dynmm")
SKIPPING = [
    x if x in QUICK_SKIP else pytest.param(x, marks=pytest.mark.nightly) for x in list_fusions()
]


@pytest.mark.parametrize("name", SKIPPING)
def test_every_fusion_trains_with_a_linear_skip(name: str, tmp_path: Path) -> None:
    data = ["--data.name", "interactions", "--data.samples", "200", "--data.num_modalities", "3"]
    flags = [*data, "--data.missing", "0.3", "--fusion.dim", "32", "--fusion.name", name]
    flags += ["--fusion.linear_skip", "true"]
    assert train([*flags, *QUICK, "--out", str(tmp_path / "run")]) == 0
    check_run(tmp_path / "run")
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    trained = [x for key, x in weights.items() if key.startswith("fusion.linear_skip.")]
    assert len(trained) == 3
    assert all(x.any() for x in trained)


@pytest.mark.nightly
@pytest.mark.parametrize("missing", ["0.0", "0.3"])
@pytest.mark.parametrize("name", list_fusions())
def test_every_fusion_trains_on_digits(name: str, missing: str, tmp_path: Path) -> None:
    flags = ["--fusion.name", name, "--data.missing", missing, "--train.unimodal", "false"]
    flags += ["--data.samples", "200"]
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
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(rank), str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for one in ranks:
        _, said = one.communicate(timeout=500)
        assert one.returncode == 0, said[-2000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_every_loss_trains_on_two_processes_while_much_is_missing(
    name: str, two_processes: Path
) -> None:
    check_run(two_processes / name)


# ---- phases


def make_trainer(name: str) -> Trainer:
    torch.manual_seed(0)
    encoders = {m: {"name": "vector/mlp", "in_dim": 5, "dim": 6} for m in ("image", "text")}
    model = create_model(name, encoders, 3, dim=8)
    heads = UnimodalHeads({}, 8, torch.full((3,), 1 / 3))
    ids = [str(row) for row in range(8)]
    objective = Objective(model, heads, None, ids, torch.arange(8) % 3)
    freeze_unused(objective)
    cfg = from_tree(RunConfig, {"optim": {"lr": 0.1}})
    groups = param_groups(model, heads, cfg.optim)
    return Trainer(objective, build_optimizer(groups, cfg.optim), cfg, World())


def make_batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    inputs = {m: {"values": torch.randn(8, 5, generator=draw)} for m in ("image", "text")}
    present = torch.ones(8, 2, dtype=torch.bool)
    return Batch([str(row) for row in range(8)], inputs, present, torch.arange(8) % 3)


@pytest.mark.parametrize("name", ["late_stacking", "mmin"])
def test_what_rests_in_a_phase_does_not_move_by_momentum_or_decay_either(name: str) -> None:
    trainer = make_trainer(name)
    for _ in range(3):
        trainer.step([make_batch()], StepContext(phase=0))
    rest = frozen_in_phase(trainer.module.model, trainer.freeze_plan.phases[1])
    before = [p.detach().clone() for p in rest]
    others = [p for p in trainer.module.model.parameters() if all(p is not q for q in rest)]
    moving = [p.detach().clone() for p in others]
    for _ in range(3):
        trainer.step([make_batch()], StepContext(phase=1))
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


def test_encoders_that_rest_are_in_evaluation_mode() -> None:
    trainer = make_trainer("mmin")
    trainer.step([make_batch()], StepContext(phase=1))
    assert not any(module.training for module in trainer.module.model.encoders.modules())
    trainer.step([make_batch()], StepContext(phase=0))
    assert all(module.training for module in trainer.module.model.encoders.modules())


def test_a_phase_names_what_learns() -> None:
    model = make_trainer("gmu").module.model
    some = frozen_in_phase(model, Phase("gates", 1.0, trains=("gate",), encoders=False))
    learning = [n for n, p in model.named_parameters() if all(p is not q for q in some)]
    assert learning == ["fusion.gate.weight"]


def test_a_loss_sees_the_samples_numbers_and_remembers_them() -> None:
    trainer = make_trainer("qmf")
    batch = make_batch()
    part = {m: {"values": x["values"][[6, 2]]} for m, x in batch.inputs.items()}
    trainer.step([Batch(["6", "2"], part, batch.present[:2], torch.tensor([0, 2]))])
    total = trainer.module.memory.total  # type: ignore[union-attr]
    assert (total[[6, 2]] > 0).all()
    assert (total[[0, 1, 3, 4, 5, 7]] == 0).all()
    assert "memory.total" in trainer.module.state_dict()
    assert not any("memory" in key for key in trainer.module.model.state_dict())


if __name__ == "__main__":
    train_in_process(int(sys.argv[1]), sys.argv[2])
