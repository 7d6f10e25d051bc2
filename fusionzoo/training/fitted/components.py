"""Models of principal components: boosted trees, and a tabular foundation model."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError, explained

from .method import Fitted, Inputs, Matrix, Method, Setting, least

COMPONENTS = 128  # of all modalities together, shared equally
RATES, LEAVES, ROUNDS = (0.05, 0.2), (8, 31), 100  # of boosted trees
REPOSITORY = "jingang/TabICL"  # of the Hugging Face Hub
CLASSIFIER, REGRESSOR = "TabICLClassifier", "TabICLRegressor"


class Trees(Method):
    """Histogram-based gradient boosting (Ke et al., "LightGBM", NeurIPS 2017), scikit-learn's.

    Validation chooses the learning rate and the number of leaves; a modality that a sample lacks is
    a missing value, which trees send to the side that suits them.
    """

    def choose(self, fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
        pairs = itertools.product(RATES, LEAVES)
        return least([{"rate": rate, "leaves": leaves} for rate, leaves in pairs], fit)

    def shares(
        self, learned: Inputs, labels: NDArray[np.int64], asked: Inputs, setting: Setting
    ) -> tuple[NDArray[np.int64], Matrix]:
        from sklearn.ensemble import HistGradientBoostingClassifier

        x, others = principal_components(learned, asked)
        model = _grow(HistGradientBoostingClassifier, setting, x, labels, learned.weights)
        return model.classes_, model.predict_proba(others)

    def numbers(self, learned: Inputs, y: Matrix, asked: Inputs, setting: Setting) -> Matrix:
        from sklearn.ensemble import HistGradientBoostingRegressor

        x, others = principal_components(learned, asked)
        create, weights = HistGradientBoostingRegressor, learned.weights
        models = [_grow(create, setting, x, column, weights) for column in y.T]
        return np.stack([model.predict(others) for model in models], 1)


def _grow(
    create: Callable[..., Any], setting: Setting, x: Matrix, y: NDArray[Any], weights: Matrix | None
) -> Any:
    """Fit boosted trees."""
    model = create(
        learning_rate=setting["rate"],
        max_leaf_nodes=int(setting["leaves"]),
        max_iter=ROUNDS,
        early_stopping=False,
        random_state=0,
    )
    return model.fit(x, y, sample_weight=weights)


class Tabular(Method):
    """TabICL (Qu et al., ICML 2025), with the weights and settings of its second version.

    Frozen encoders, principal components, then a transformer that was trained on synthetic tables
    and reads the training samples as context: no step of training, no setting to choose.
    """

    most_rows = 50_000
    weighs_rows = False

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
    """Return the file of a model's weights in the Hub's cache; an error says how to get it there.

    No benchmark waits for a network, or downloads 100 MB unasked.
    """
    from huggingface_hub import hf_hub_download

    name = getattr(_tabicl(), kind)().checkpoint_version
    try:
        return Path(hf_hub_download(REPOSITORY, name, local_files_only=True))
    except (OSError, ValueError) as error:  # what it raises where there is no such file
        raise FusionZooError(
            f"weights of TabICL not found ({name}): `hf download {REPOSITORY} {name}` gets them"
        ) from error


def _tabicl() -> Any:
    with explained("TabICL needs pip install 'fusionzoo[tfm]'", ImportError):
        return importlib.import_module("tabicl")


def principal_components(learned: Inputs, asked: Inputs) -> tuple[Matrix, Matrix]:
    """Return the samples' principal components, learnt from the first: (N, P) and (n, P).

    Each modality has COMPONENTS / M of them; narrower vectors stay as they are. NaN where a sample
    lacks the modality.
    """
    from sklearn.decomposition import PCA

    most = max(COMPONENTS // len(learned.parts), 1)
    pairs = []
    for column, (x, others) in enumerate(zip(learned.parts, asked.parts, strict=True)):
        there, asked_there = learned.present[:, column], asked.present[:, column]
        count = min(most, int(there.sum()), x.shape[1])
        if not count:
            continue  # no sample to learn from has the modality
        if count < x.shape[1]:
            reduce = PCA(count, random_state=0).fit(x[there])
            x, others = reduce.transform(x), reduce.transform(others)
        both = ((x, there), (others, asked_there))
        pairs.append([np.where(has[:, None], values, np.nan) for values, has in both])
    parts, others_parts = zip(*pairs, strict=True)
    return np.concatenate(parts, 1), np.concatenate(others_parts, 1)
