"""Trainings that are stopped: at a step, or within one of several."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionzoo.training import checkpoint
from fusionzoo.training.trainer import Trainer

PREEMPTED = 75  # exit code of a run that SIGTERM stopped


def preempt_at(step: int, run: Callable[[], Any]) -> Any:
    """Run, and ask it to stop (SIGTERM) in a step, the first being 1; return what `run` does."""
    learn, steps = Trainer.step, iter(range(1, 10**6))

    def stopped(*arguments: Any, **settings: Any) -> Any:
        if next(steps) == step:
            signal.raise_signal(signal.SIGTERM)
        return learn(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stopped)
        return run()


def kill_in(number: int, run: Callable[[], Any]) -> None:
    """Run until the training in the folder `number` has its first best epoch."""
    save = checkpoint.save

    def killed(path: Path, *rest: Any, **more: Any) -> None:
        save(path, *rest, **more)
        if path.parts[-3:] == (str(number), "checkpoints", "best.pt"):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
