"""Settings of a run: dataclasses (`schema`), dotted flags (`flags`), YAML and checks (`load`)."""

from .flags import parse_flags, read_yaml
from .load import from_args, from_settings, from_tree, help_text, merge, split_name, write_yaml
from .schema import (
    BenchmarkConfig,
    DistConfig,
    EmbedConfig,
    EvaluateConfig,
    OptimConfig,
    PredictConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "BenchmarkConfig",
    "DistConfig",
    "EmbedConfig",
    "EvaluateConfig",
    "OptimConfig",
    "PredictConfig",
    "RunConfig",
    "TrainConfig",
    "from_args",
    "from_settings",
    "from_tree",
    "help_text",
    "merge",
    "parse_flags",
    "read_yaml",
    "split_name",
    "write_yaml",
]
