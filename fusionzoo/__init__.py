"""Multimodal feature-fusion model zoo: encoders, fusions, paired data, training, embedding.

Names are imported when first used, so that `import fusionzoo` costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from .ground.version import __version__ as __version__

if TYPE_CHECKING:
    from .api import analyse as analyse
    from .api import embed as embed
    from .api import evaluate as evaluate
    from .api import predict as predict
    from .api import register as register
    from .api import train as train
    from .benchmark.api import benchmark as benchmark
    from .benchmark.report.page import Report as Report
    from .datasets import PairedDataset as PairedDataset
    from .datasets import list_datasets as list_datasets
    from .embeddings.files import read_embeddings as read_embeddings
    from .encoders import create_encoder as create_encoder
    from .encoders import list_encoders as list_encoders
    from .encoders import wrap_encoder as wrap_encoder
    from .errors import FusionZooError as FusionZooError
    from .fusion import create_fusion as create_fusion
    from .fusion import fusion_info as fusion_info
    from .inputs.data import create_dataset as create_dataset
    from .model.fusion_model import FusionModel as FusionModel
    from .model.fusion_model import create_model as create_model
    from .model.trained_models import list_models as list_models
    from .tools.convert.convert import convert as convert
    from .tools.explain.explain import explain as explain
    from .tools.export.export import export as export
    from .tools.export.runtime import load as load
    from .tools.reproduce import reproduce as reproduce
    from .tools.run_report.report import report as report
    from .tools.search.search import Searcher as Searcher
    from .tools.search.search import search as search
    from .tools.serve.server import serve as serve
    from .training.report import Run as Run
    from .zoo.facts import list_fusions as list_fusions

if "OMP_WAIT_POLICY" not in os.environ:
    # Of torch, if it is not loaded yet: threads spin for microseconds while they wait for others,
    # not for milliseconds, which make a small training beside other work five times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "encoders")):
    from .ground import unlinked  # noqa: F401, a checkout without symbolic links

_HOME = {
    "train": "api",
    "evaluate": "api",
    "predict": "api",
    "embed": "api",
    "analyse": "api",
    "benchmark": "benchmark",  # the package itself, which can be called
    "Report": "benchmark.report.page",
    "convert": "tools.convert.convert",
    "PairedDataset": "datasets",
    "create_dataset": "inputs.data",
    "list_datasets": "datasets",
    "create_encoder": "encoders",
    "list_encoders": "encoders",
    "wrap_encoder": "encoders",
    "FusionZooError": "errors",
    "read_embeddings": "embeddings.files",
    "create_fusion": "fusion",
    "fusion_info": "fusion",
    "list_fusions": "zoo.facts",
    "FusionModel": "model.fusion_model",
    "create_model": "model.fusion_model",
    "list_models": "model.trained_models",
    "load": "tools.export.runtime",
    "Run": "training.report",
    "register": "api",
    "search": "tools.search.search",
    "explain": "tools.explain.explain",
    "export": "tools.export.export",
    "report": "tools.run_report.report",
    "reproduce": "tools.reproduce",
    "Searcher": "tools.search.search",
    "serve": "tools.serve.server",
}
__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fusionzoo' has no attribute {name!r}")
    module = import_module(f".{_HOME[name]}", __name__)
    return module if _HOME[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
