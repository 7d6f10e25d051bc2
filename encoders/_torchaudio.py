"""Import torchaudio if this environment's torch lets it be imported; only its own encoders need it.

torchaudio's last release refuses a torch that was built for another CUDA version, by an error on
import. transformers imports it wherever it is installed, so its audio models would fail as well:
after such an error every library sees torchaudio as absent and does without.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fusionzoo.errors import FusionZooError, one_line


@cache
def _import() -> tuple[Any, str]:
    """Return torchaudio, or None and why it cannot be imported."""
    try:
        import torchaudio
        import torchaudio.models
        import torchaudio.pipelines
    except (ImportError, OSError, RuntimeError) as error:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]
        return None, one_line(error).rstrip(".")
    return torchaudio, ""


def torchaudio_or_none() -> Any:
    """Return torchaudio, or None where it cannot be imported."""
    return _import()[0]


def require_torchaudio() -> Any:
    """Return torchaudio; where it cannot be imported, raise one line that says why."""
    module, reason = _import()
    if module is None:
        try:
            library = f"torchaudio {version('torchaudio')}"
        except PackageNotFoundError:
            library = "torchaudio"
        raise FusionZooError(
            f"torchaudio/* encoders need torchaudio, and {library} cannot be imported beside torch"
            f" {torch.__version__}: {reason}. Take another audio encoder, such as mel/resnet18 or"
            " hf/<folder>, or a torch that it was built for: pip install 'torch==2.11.*'"
            " 'torchvision==0.26.*' 'torchaudio==2.11.*'"
        )
    return module
