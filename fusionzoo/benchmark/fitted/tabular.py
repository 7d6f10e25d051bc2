"""A tabular foundation model on principal components: no training, labels are its context."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError, one_line

from .method import Fitted, Inputs, Matrix, Method, Setting, principal_components

REPOSITORY = "jingang/TabICL"  # of the Hugging Face Hub
CLASSIFIER, REGRESSOR = "TabICLClassifier", "TabICLRegressor"


class Tabular(Method):
    """TabICL (Qu et al., ICML 2025), with the weights and settings of its second version.

    Frozen encoders, principal components, then a transformer that was trained on synthetic tables
    and reads the training samples as context: no step of training, no setting to choose.
    """

    most_rows = 50_000

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def choose(self, fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
        return {}, fit({})

    def shares(
        self, learned: Inputs, labels: NDArray[np.int64], asked: Inputs, setting: Setting
    ) -> tuple[NDArray[np.int64], Matrix]:
        x, others = principal_components(learned, asked)
        model = self._model(CLASSIFIER).fit(x, labels)
        return np.asarray(model.classes_), np.asarray(model.predict_proba(others), np.float64)

    def numbers(self, learned: Inputs, y: Matrix, asked: Inputs, setting: Setting) -> Matrix:
        x, others = principal_components(learned, asked)
        columns = [self._model(REGRESSOR).fit(x, column).predict(others) for column in y.T]
        return np.stack(columns, 1).astype(np.float64)

    def _model(self, kind: str) -> Any:
        """Return a model with weights that are here; see `find_weights`."""
        create = getattr(_tabicl(), kind)
        weights = find_weights(kind)
        return create(model_path=weights, allow_auto_download=False, device=self.device)


def find_weights(kind: str) -> Path:
    """Return the file of a model's weights, downloaded where it is not here yet.

    An error says that it cannot be had, and how to get it.
    """
    from huggingface_hub import hf_hub_download

    name = getattr(_tabicl(), kind)().checkpoint_version
    try:
        return Path(hf_hub_download(REPOSITORY, name))
    except Exception as error:  # of the network, of its library or of the cache's folder
        raise FusionZooError(
            f"weights of TabICL not found ({name}): run `hf download {REPOSITORY} {name}` where"
            " there is a network, and copy the Hub's cache (~/.cache/huggingface) here"
            f" [{one_line(error)}]"
        ) from error


def _tabicl() -> Any:
    try:
        return importlib.import_module("tabicl")
    except ImportError:
        raise FusionZooError("TabICL is not installed: pip install 'fusionzoo[tfm]'") from None
