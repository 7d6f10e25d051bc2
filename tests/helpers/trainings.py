"""Runs of several trainings that are killed within one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionzoo.training import checkpoint


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
