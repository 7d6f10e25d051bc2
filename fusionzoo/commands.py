"""The console commands `fusionzoo evaluate` and `fusionzoo predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import EvaluateConfig, PredictConfig
from .config.command import run_command
from .console import print_table
from .errors import FusionZooError

EVALUATE_HELP = """
Measure a model on a data set: `fusionzoo evaluate runs/a --data.name manifest --data.root my.csv`.

Prints the metrics of the fusion and of each modality's own head; --out writes them as JSON.
Without --data, of the data that it was trained on. Samples that training read are counted.
"""
PREDICT_HELP = """
Predict every sample: `fusionzoo predict runs/a --data.name digits --out p.csv`.

One row per sample: id, label, p_<class>, present_<modality>; a .csv or .parquet file.
"""


def evaluate_command(args: Sequence[str]) -> int:
    """Run `fusionzoo evaluate MODEL ...`; return 0, or 2 after a user's mistake."""

    def start(cfg: EvaluateConfig) -> int:
        from .inference.evaluate import evaluate
        from .inference.retrieval import RETRIEVAL, retrieval_rows

        metrics = evaluate(cfg)
        header, rows = metrics_table(metrics)
        if header[1:]:
            title = f"Split {cfg.split!r}" if cfg.split != "all" else "All samples"
            print_table(title, header, rows)
        if RETRIEVAL in metrics:
            header, rows = retrieval_rows(metrics[RETRIEVAL])
            print_table("Retrieval, with 95 % intervals over queries", header, rows)
        if cfg.out:
            print(f"wrote {cfg.out}")
        return 0

    return run_command(EvaluateConfig, EVALUATE_HELP, model_first(args), start)


def predict_command(args: Sequence[str]) -> int:
    """Run `fusionzoo predict MODEL ... --out FILE`; return 0, or 2 after a user's mistake."""

    def start(cfg: PredictConfig) -> int:
        if not cfg.out:
            raise FusionZooError("--out is missing: a .csv or .parquet file for the predictions")
        from .inference.predict import predict

        print(f"wrote {predict(cfg)}")
        return 0

    return run_command(PredictConfig, PREDICT_HELP, model_first(args), start)


def model_first(args: Sequence[str]) -> list[str]:
    """Write the model as a flag where it is the first word.

    >>> model_first(["runs/a", "--split", "val"])
    ['--model', 'runs/a', '--split', 'val']
    """
    named = not args or args[0].startswith("-")
    return list(args) if named else ["--model", *args]


def metrics_table(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: the fusion, each modality alone, each subset."""
    names = [name for name, value in metrics.items() if not isinstance(value, Mapping)]
    lines = {"fusion": metrics}
    lines |= {f"{name} alone": line for name, line in metrics.get("unimodal", {}).items()}
    lines |= {f"fusion given {name}": line for name, line in metrics.get("subsets", {}).items()}
    rows = [[label, *(f"{line[name]:.3f}" for name in names)] for label, line in lines.items()]
    return ["", *names], rows
