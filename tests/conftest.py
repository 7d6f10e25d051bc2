"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask a hub, and none waits for one

import pytest
import torch

from fusionzoo import plugins
from fusionzoo.datasets.builtin import stamps
from fusionzoo.errors import FusionZooError

plugins._loaded_groups.add(plugins.GROUP)  # tests are about fusionzoo, whatever is installed


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_stamps() -> Path:
    """The folder of the real `stamps`, 160 MB that a user's cache or `.ci/run` holds."""
    try:
        return stamps.find(None)
    except FusionZooError as error:
        pytest.skip(str(error))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache instead of the user's."""
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def forget_plugins() -> Iterator[Callable[[], None]]:
    """Let a test register components and import plugins; what is returned undoes all of it, as a
    new process would. It is called at the test's end."""
    from fusionzoo.api import REGISTRIES
    from fusionzoo.evaluation.robustness import CORRUPTIONS
    from fusionzoo.targets import KINDS

    tables: list[dict[str, Any]] = [KINDS, *CORRUPTIONS.values()]
    stored = [dict(table) for table in tables]
    entries = {name: dict(registry._entries) for name, registry in REGISTRIES.items()}
    modules, path, groups = set(sys.modules), list(sys.path), set(plugins._loaded_groups)

    def forget() -> None:
        for name, registry in REGISTRIES.items():
            registry._entries.clear()
            registry._entries.update(entries[name])
        for table, before in zip(tables, stored, strict=True):
            table.clear()
            table.update(before)
        for name in set(sys.modules) - modules:
            if name.startswith("fusionzoo.plugins.") or "own_plugin" in name:
                del sys.modules[name]
        sys.path[:] = path
        plugins._loaded_groups.clear()
        plugins._loaded_groups.update(groups)

    yield forget
    forget()
