"""Settings of an extraction of embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .flags import Tree
from .schema import Count, DistConfig, ModelUse, option


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(ModelUse):
    encoders: dict[str, Tree] = option(
        {}, "without --model: modality -> pretrained encoder; empty = the data set's default"
    )
    fusion: Tree = option({}, "without --model: concat, max, mean or sum, without any weights")
    data: Tree = option({}, "data set and its settings; empty = that of the run")
    split: str = option("all", "train | val | test | all")
    out: str = option(
        "embeddings.parquet", "x.parquet | x.npy | x.lance | a folder, for a Parquet file per part"
    )
    dtype: Literal["float32", "float16", "int8"] = option(
        "float32", "numbers of the vectors; int8 with a column <vector>_scale"
    )
    normalise: bool = option(False, "write unit vectors")
    matryoshka: str | int | list[int] = option(
        "", "also write the first entries of the fused vector, `64,128`: columns fused_64, ..."
    )
    probabilities: bool = option(False, "also write the probability of each class")
    weights: bool = option(False, "also write the weight of each modality in the fusion")
    amp: Literal["none", "bf16"] = option("none", "mixed precision")
    compile: bool = option(False, "torch.compile encoders and fusion")
    row_group: Count = option(4096, "rows of a part: what a killed run computes again")
    overwrite: bool = option(False, "discard the parts that another extraction left at `out`")
    engine: Literal["local", "ray"] = option("local", "local: this process or torchrun's; or Ray")
    actors: Count | None = option(None, "Ray: processes with a model each; null = one per GPU")
    dist: DistConfig = field(default_factory=DistConfig)
