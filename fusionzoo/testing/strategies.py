"""The contract of training strategies: off is off, state is in the checkpoint, two processes."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusionzoo.config import DistConfig, RunConfig, from_tree, merge
from fusionzoo.datasets import PairedDataset, create_dataset
from fusionzoo.ground.plugins import definition_of, is_reference, source_of
from fusionzoo.machine.distributed import World, process_group, wrap
from fusionzoo.machine.fsdp import full_state_dict
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Batch, Features, StepContext
from fusionzoo.training.balance import BALANCE, Balance, StrategyInputs
from fusionzoo.training.build import build_objective, choose_encoders
from fusionzoo.training.loaders import build_loader, chunks
from fusionzoo.training.objective import Objective
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.trainer import Trainer

from .checks import Checks, find
from .fusions import poison

State = dict[str, Tensor]
SAMPLES = 40  # 24, 8 and 8 in train, val and test
BATCH, EPOCH_STEPS = 12, 2
DATA = {"task": "copy", "num_modalities": 3, "width": 4, "missing": 0.3}
SINGLE_PROCESS = World()
PARALLEL_STEPS = EPOCH_STEPS + 1  # the second epoch begins within
# Without Adam, which makes large steps of gradients that are all rounding.
CONFIG = {"optim": {"name": "sgd", "lr": 0.1}}
TIMEOUT = 300.0  # seconds
CHECKS: Checks[Strategy] = Checks()
STEPS = 2 * EPOCH_STEPS


@dataclass
class Strategy:
    """A training strategy to be checked."""

    target: str  # a name, `module:Class` or `file.py:Class`
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cls: type[Balance] = find(self.target, BALANCE)

    @property
    def reference(self) -> str:
        """A target that another process finds too, where no plugin is imported."""
        found_anywhere = is_reference(self.target) or source_of(self.cls) is None
        return self.target if found_anywhere else definition_of(self.cls)

    def build(self, inputs: StrategyInputs, settings: Mapping[str, Any]) -> Balance:
        """Build it as a run would: without drawing from the global generators.

        Active from the start, which some are not by default.
        """
        from_start = {"start": 0.0} if "start" in inspect.signature(self.cls).parameters else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(inputs.seed)
            return self.cls(inputs, **{**from_start, **self.settings, **settings})


class ShortRun:
    """Training of three small modalities `a`, `b`, `c`, each missing in 30 % of the samples.

    In float64, by the fusion `mean`, without dropout unless asked for. `settings` go to the
    strategy, `config` to the run. `absent` overwrites the features of missing modalities.
    """

    def __init__(
        self,
        strategy: Strategy | None,
        settings: Mapping[str, Any] | None = None,
        *,
        world: World = SINGLE_PROCESS,
        config: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
        absent: float | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        data = create_dataset("interactions", samples=SAMPLES, **DATA)
        cfg = from_tree(RunConfig, merge(_small(data, BATCH // world.size), config or {}))
        torch.manual_seed(0)
        train_set = data.split("train")
        self.objective, _ = build_objective(cfg, train_set, world)
        model = self.objective.model
        if strategy is not None:
            inputs = StrategyInputs(model, train_set.targets, cfg.seed, world)
            built = strategy.build(inputs, settings or {})
            self.objective.balance = nn.ModuleDict({built.name: built})
        self.objective.to(dtype)
        for module in self.objective.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        if absent is not None:
            vars(model)["content"], model.__class__ = absent, _Absent  # copies do so, too
        collate = _Collate(self.objective, dtype)
        self.loaders = {
            name: build_loader(data.split(name), collate, cfg, world, name)
            for name in ("train", "val")
        }
        groups = param_groups(model, self.objective.heads, cfg.optim, self.objective.balance)
        optimizer = build_optimizer(groups, cfg.optim)
        self.trainer = Trainer(wrap(self.objective, cfg.dist, world), optimizer, cfg, world)

    def steps(self, first: int, last: int) -> ShortRun:
        """Make the steps `first` to `last` - 1 of the run; an epoch has `EPOCH_STEPS`."""
        for step in range(first, last):
            epoch, place = divmod(step, EPOCH_STEPS)
            context = StepContext(step=step, epoch=step / EPOCH_STEPS)
            if place == 0:
                self.trainer.begin_epoch(self.loaders, context)
            self.step(next(chunks(self.loaders["train"], 1, epoch, skip=place)), context)
        return self

    def step(self, batches: Sequence[Batch], context: StepContext) -> None:
        """Make one step; a loss or gradient that is not finite is an error."""
        result = self.trainer.step(batches, context)
        assert not result.skipped, f"step {context.step}: {result.skipped}"
        assert result.loss.isfinite(), f"step {context.step}: the loss is not finite"

    def batches(self) -> list[Batch]:
        """Return the batches of the first epoch."""
        return [batches[0] for batches in chunks(self.loaders["train"], 1, 0)]

    def weights(self) -> State:
        """Return the parameters of the model and of its heads, without those of the strategy."""
        state = {name: x.clone() for name, x in full_state_dict(self.objective).items()}
        return {name: x for name, x in state.items() if not name.startswith("balance.")}

    def state(self) -> State:
        """Return all parameters and buffers, those of the strategy included."""
        return {name: x.clone() for name, x in full_state_dict(self.objective).items()}

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint holds of weights and optimiser."""
        return self.state(), copy.deepcopy(self.trainer.optimizer.state_dict())

    def restore(self, checkpoint: tuple[dict[str, Any], dict[str, Any]]) -> ShortRun:
        """Go on from a checkpoint."""
        self.objective.load_state_dict(checkpoint[0])
        self.trainer.optimizer.load_state_dict(checkpoint[1])
        return self


def _small(data: PairedDataset, batch_size: int) -> dict[str, Any]:
    """Return the settings of a run of small encoders."""
    small = {name: {"dim": 6, "hidden": 8} for name in data.modalities}
    return {
        "fusion": {"name": "mean", "dim": 8},
        "encoders": choose_encoders(data, small),
        "optim": {"lr": 0.01},
        "train": {"batch_size": batch_size, "num_workers": 0},
    }


class _Absent(FusionModel):
    """Overwrites the features of missing modalities."""

    content: float

    def encode(self, batch: Batch) -> dict[str, Features]:
        return poison(super().encode(batch), self.content)


class _Collate:
    """Collate samples, with inputs in the precision of the run."""

    def __init__(self, objective: Objective, dtype: torch.dtype) -> None:
        self.collate, self.dtype = objective.model.collate(), dtype

    def __call__(self, samples: Sequence[Any]) -> Batch:
        batch: Batch = self.collate(samples)
        return batch._replace(inputs=batch.map(lambda tensor: tensor.to(self.dtype)).inputs)


def assert_equal(state: State, expected: State, why: str, tolerance: float = 0.0) -> None:
    """Require equal tensors, to the bit where `tolerance` is 0."""
    assert state.keys() == expected.keys(), f"{why}: other names of weights"
    for name, x in expected.items():
        if not torch.allclose(state[name], x, rtol=tolerance, atol=tolerance):
            off = (state[name].double() - x.double()).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}")


def strategy(target: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """Return the training strategy of a name, `module:Class` or `file.py:Class`."""
    return Strategy(target, settings or {})


def two_processes_learn_what_one_does(strategy: Strategy) -> None:
    """Tried: three steps on two processes (gloo) and on one; weights and state to 1e-6."""
    expected = learn(strategy, World())
    with tempfile.TemporaryDirectory() as folder:
        for rank, states in enumerate(learn_in_two([strategy], Path(folder))):
            assert_equal(states[0], expected, f"process {rank} of two", tolerance=1e-6)


def learn(strategy: Strategy, world: World) -> State:
    """Return the state after some steps."""
    return ShortRun(strategy, world=world, config=CONFIG).steps(0, PARALLEL_STEPS).state()


def learn_in_two(strategies: Sequence[Strategy], folder: Path) -> list[list[State]]:
    """Train each strategy in two processes; return its state in each of them."""
    references = [{"target": x.reference, "settings": x.settings} for x in strategies]
    (folder / "strategies.json").write_text(json.dumps(references))
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


@CHECKS.add
def switched_off_it_leaves_plain_training_as_it_is(strategy: Strategy) -> None:
    """Tried: `end=0`, and `start` beyond the run, with dropout; weights equal to the bit."""
    expected = plain_weights(dropout=0.1)
    for settings in ({"end": 0.0}, {"start": 1000.0}):
        off = ShortRun(strategy, settings, dropout=0.1).steps(0, STEPS)
        assert_equal(off.weights(), expected, f"switched off by {settings}")


@cache
def plain_weights(dropout: float = 0.0) -> State:
    """Return the weights after a run without a strategy."""
    return ShortRun(None, dropout=dropout).steps(0, STEPS).weights()


@CHECKS.add
def it_changes_what_is_learned(strategy: Strategy) -> None:
    """Tried: training with it and without it; the weights differ."""
    weights = ShortRun(strategy).steps(0, STEPS).weights()
    plain = plain_weights()
    assert any(not torch.equal(x, plain[name]) for name, x in weights.items()), "nothing changes"


@CHECKS.add
def it_draws_from_no_global_generator(strategy: Strategy) -> None:
    """Tried: two runs under other global seeds; equal weights, generators as they were."""
    states = []
    for seed in (1, 2):
        run = ShortRun(strategy)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = _generators()
        states.append(run.steps(0, STEPS).state())
        for name, state in _generators().items():
            assert state == before[name], f"it draws from {name}'s global generator"
    assert_equal(states[1], states[0], "with another global seed")


def _generators() -> dict[str, object]:
    numpy_state = pickle.dumps(np.random.get_state())
    torch_state = torch.get_rng_state().numpy().tobytes()
    return {"torch": torch_state, "Python": random.getstate(), "NumPy": numpy_state}


@CHECKS.add
def a_checkpoint_restores_it(strategy: Strategy) -> None:
    """Tried: stopping within the second epoch, and going on with a new one; equal to the bit."""
    expected = ShortRun(strategy).steps(0, STEPS).state()
    stopped = ShortRun(strategy).steps(0, EPOCH_STEPS + 1)
    resumed = ShortRun(strategy).restore(stopped.checkpoint())
    state = resumed.steps(EPOCH_STEPS + 1, STEPS).state()
    assert_equal(state, expected, "restored from a checkpoint")


@CHECKS.add
def the_content_of_a_missing_modality_changes_nothing(strategy: Strategy) -> None:
    """Tried: NaN and 0 in the features of missing modalities; equal to the bit."""
    states = [ShortRun(strategy, absent=x).steps(0, STEPS).state() for x in (0.0, float("nan"))]
    assert_equal(states[1], states[0], "missing features set to NaN")


@CHECKS.add
def any_missing_modalities_are_no_trouble(strategy: Strategy) -> None:
    """Tried: batches that all lack some modalities, or all of them, and a batch of no rows."""
    run = ShortRun(strategy)
    batch = run.batches()[0]
    batches = [batch.take(torch.zeros(0, dtype=torch.int64))]
    for presence in product([True, False], repeat=batch.present.shape[1]):
        batches.append(batch._replace(present=batch.present & torch.tensor(presence)))
    for step, case in enumerate(batches):
        run.step([case], StepContext(step=step, epoch=step / EPOCH_STEPS))
        for name, x in run.state().items():
            subset = case.present.any(0).tolist()
            assert x.isfinite().all(), f"{name} is not finite after a batch of presence {subset}"


@CHECKS.add
def bfloat16_and_accumulation_stay_finite(strategy: Strategy) -> None:
    """Tried: bfloat16 autocast over float32 weights, two uneven batches for each step."""
    run = ShortRun(strategy, dtype=torch.float32, config={"train": {"amp": "bf16"}})
    for step, batch in enumerate(run.batches()):
        parts = [batch.take(rows) for rows in torch.arange(len(batch.ids)).split([7, 5])]
        run.step(parts, StepContext(step=step, epoch=step / EPOCH_STEPS))
    for name, x in run.state().items():
        assert x.isfinite().all(), f"{name} is not finite"


@CHECKS.add
def evaluation_and_the_saved_model_know_nothing_of_it(strategy: Strategy) -> None:
    """Tried: its model's weights in a plain model: equal logits, and no state moves."""
    run, plain = ShortRun(strategy).steps(0, 1).objective.eval(), ShortRun(None)
    weights = run.model.state_dict()
    model = plain.objective.model.eval()
    assert weights.keys() == model.state_dict().keys(), "the model has other weights"
    model.load_state_dict(weights)
    before = {name: x.clone() for name, x in run.state_dict().items()}
    batch = plain.batches()[0]
    with torch.no_grad():
        logits, expected = run(batch).logits, model(batch).logits
    assert torch.equal(logits, expected), "the logits are not those of the model without it"
    assert_equal(run.state_dict(), before, "after an evaluation")


CHECKS.add(two_processes_learn_what_one_does)
