"""Settings of `fusionzoo analyse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from fusionzoo.config.flags import Tree
from fusionzoo.config.schema import Count, option

SOURCE = "a data set's name, a manifest or a folder of class folders (required)"


@dataclass(frozen=True, kw_only=True)
class AnalyseConfig:
    """Settings of an analysis."""

    source: str = option("", SOURCE)
    data: Tree = option({}, "settings of the data set, as in train.py: --data.<setting>")
    plugins: str | list[str] = option(
        "", "files or modules with components of your own, `my_data.py`: docs/plugins.md"
    )
    model: str = option("", "model or run folder: analyse its interactions (emap), not the data")
    encoders: dict[str, Tree] = option({}, "modality -> encoder; empty = the data set's default")
    encoder_epochs: Count = option(10, "epochs to train encoders without weights")
    folds: Annotated[int, Ge(0)] | None = option(
        None, "cross-validation folds; 0 = the data's split; null = 5 below 5,000 samples, else 0"
    )
    pid_mode: Literal["cvx", "batch", "sample"] = option(
        "cvx", "cvx: counts clusters; batch, sample: probes of the class, sample for each sample"
    )
    clusters: Count | None = option(
        None, "cvx: K-means clusters of each source; null = chosen on training rows left out"
    )
    by_sample: str = option("", "pid_mode sample: file for each sample's parts, .csv or .parquet")
    split: str = option("test", "emap: train | val | test | all")
    samples: Count = option(400, "emap: most samples; two modalities take their square of passes")
    completions: Count = option(256, "emap: random completions with three or more modalities")
    json: str = option("", "file for the figures")
    jobs: Count | None = option(None, "processes; null = one per core")
    num_workers: Annotated[int, Ge(0)] | None = option(None, "loader processes while encoding")
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    seed: int = option(0, "of folds, clusters and completions")
