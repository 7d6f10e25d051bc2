"""AutoGluon's side of `perf/autogluon.py` and `perf/default.py`; run in its environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def fit_table(settings: dict[str, Any]) -> dict[str, float]:
    """Fit a table's rows; return the test score, and the CPU seconds of it without imports."""
    import pandas as pd
    from autogluon.tabular import TabularPredictor  # type: ignore[import-not-found]

    train, test = (pd.read_csv(settings[name]) for name in ("train", "test"))
    start = sum(os.times()[:4])  # of this process and its children
    predictor = TabularPredictor(
        label="target", eval_metric=settings["metric"], path=settings["folder"], verbosity=0
    )
    predictor.fit(train, presets="medium_quality", num_gpus=0)
    score = predictor.evaluate(test, silent=True)[settings["metric"]]
    return {"score": score, "cpu_s": sum(os.times()[:4]) - start}


def fit_fold(settings: dict[str, Any]) -> dict[str, float]:
    """Fit on the tables of a fold; return accuracies."""
    import pandas as pd
    from autogluon.multimodal import MultiModalPredictor  # type: ignore[import-not-found]

    tables = {name: pd.read_csv(settings[name]) for name in ("train", "val", "test")}
    predictor = MultiModalPredictor(
        label="target", problem_type="multiclass", eval_metric="accuracy", path=settings["folder"]
    )
    predictor.fit(
        tables["train"],
        tuning_data=tables["val"],
        seed=settings["seed"],
        hyperparameters={
            "model.names": ["timm_image", "hf_text", "fusion_mlp"],
            "model.timm_image.checkpoint_name": settings["image"],
            "model.hf_text.checkpoint_name": settings["text"],
            "optim.max_epochs": settings["epochs"],
            "env.num_gpus": 0,
            "env.num_workers": 0,
            "env.num_workers_inference": 0,
        },
    )
    return {name: predictor.evaluate(tables[name])["accuracy"] for name in ("val", "test")}


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    answer = fit_table(request) if "metric" in request else fit_fold(request)
    Path(request["out"]).write_text(json.dumps(answer))
