"""The contract of training strategies: off is off, state is in the checkpoint, evaluation is plain.

All checks train a small model on the CPU (`short_run`) in float64, for four steps in two epochs
unless they say otherwise.
"""

from __future__ import annotations

import pickle
import random
from functools import cache
from itertools import product

import numpy as np
import torch

from fusionzoo.structures import StepContext

from .checks import Checks
from .short_run import EPOCH_STEPS, ShortRun, State, Strategy, assert_equal
from .two_processes import two_processes_learn_what_one_does

CHECKS: Checks[Strategy] = Checks()
STEPS = 2 * EPOCH_STEPS


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
        context = StepContext(step=step, epoch=step / EPOCH_STEPS)
        run.step([case], context)
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
