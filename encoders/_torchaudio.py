"""Import torchaudio, an extra that its own encoders alone need, if it can be imported.

Its last release, 2.11, raises an error on import beside a newer torch, and transformers imports it
wherever it is installed. After a failure here every library sees torchaudio as absent and does
without.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from fusionzoo.errors import FusionZooError, one_line

EXTRA = "pip install 'fusionzoo[torchaudio]'"


@cache
def _import() -> tuple[Any, str]:
    """Return torchaudio, or None and why it cannot be imported."""
    if find_spec("torchaudio") is None:
        return None, ""
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


def broken_torchaudio() -> str:
    """Return what to do about a torchaudio that is installed and cannot be imported, or nothing."""
    reason = _import()[1]
    return reason and (
        f"torchaudio cannot be imported beside torch {torch.__version__} ({reason}), and then parts"
        f" of transformers cannot be either: pip uninstall torchaudio, or {EXTRA}, which brings the"
        " torch that it was built for"
    )


def require_torchaudio() -> Any:
    """Return torchaudio; where it cannot be imported, raise one line that says why."""
    module, reason = _import()
    if module is None:
        beside = f", which cannot be imported beside torch {torch.__version__}: {reason}"
        raise FusionZooError(
            f"torchaudio/* encoders need torchaudio{beside * bool(reason)}. {EXTRA} brings its last"
            " release, 2.11, and the torch it was built for; mel/resnet18 and hf/<folder> need none"
        )
    return module
