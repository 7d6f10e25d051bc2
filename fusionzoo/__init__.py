"""Multimodal feature-fusion model zoo: encoders, fusions, paired data, training, embedding.

Names are imported when first used, so that `import fusionzoo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .benchmark.api import benchmark as benchmark
    from .datasets import PairedDataset as PairedDataset
    from .datasets import create_dataset as create_dataset
    from .datasets import list_datasets as list_datasets
    from .encoders import create_encoder as create_encoder
    from .encoders import list_encoders as list_encoders
    from .errors import FusionZooError as FusionZooError
    from .fusion import create_fusion as create_fusion
    from .fusion import fusion_info as fusion_info
    from .fusion import list_fusions as list_fusions
    from .model import create_model as create_model
    from .model import load as load

__version__ = "0.1.0"

_HOME = {
    "benchmark": "benchmark",  # the package itself, which can be called
    "PairedDataset": "datasets",
    "create_dataset": "datasets",
    "list_datasets": "datasets",
    "create_encoder": "encoders",
    "list_encoders": "encoders",
    "FusionZooError": "errors",
    "create_fusion": "fusion",
    "fusion_info": "fusion",
    "list_fusions": "fusion",
    "create_model": "model",
    "load": "model",
}
__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fusionzoo' has no attribute {name!r}")
    module = import_module(f".{_HOME[name]}", __name__)
    return module if _HOME[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
