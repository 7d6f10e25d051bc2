"""Trainings that are stopped: at a step, or within one of several."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionzoo.training import checkpoint
from fusionzoo.training.checkpoint import State
from fusionzoo.training.report import Run
from fusionzoo.training.trainer import Trainer

PREEMPTED = 75  # exit code of a run that SIGTERM stopped


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a run's last checkpoint."""
    state = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    found: dict[str, Tensor] = state["objective"]
    return found


def assert_same_run(first: Path, second: Path) -> None:
    """Require equal weights, lines of the log and final figures, bit for bit."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert (first / "metrics.jsonl").read_text() == (second / "metrics.jsonl").read_text()
    results = [json.loads((out / "metrics.json").read_text()) for out in (first, second)]
    for part in ("train", "val", "test", "unimodal"):
        assert results[0][part] == results[1][part]


def preempt_at(step: int, run: Callable[[], Any]) -> Any:
    """Run, and ask it to stop (SIGTERM) in a step, the first being 1; return its `Run`, without a
    folder if it raises SystemExit."""
    learn, steps = Trainer.step, iter(range(1, 10**6))

    def stopped(*arguments: Any, **settings: Any) -> Any:
        if next(steps) == step:
            signal.raise_signal(signal.SIGTERM)
        return learn(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stopped)
        try:
            return run()
        except SystemExit as stop:
            return Run(Path(), int(str(stop.code)))


def kill_in(number: int, run: Callable[[], Any]) -> None:
    """Run until the training in the folder `number` has written its first epoch."""
    save = checkpoint.save

    def killed(path: Path, trainer: Trainer, state: State, keep: int) -> None:
        save(path, trainer, state, keep)
        if path.parts[-3] == str(number) and state.evaluated:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        patch.setattr(checkpoint, "PAUSE", 0)
        with pytest.raises(KeyboardInterrupt):
            run()
