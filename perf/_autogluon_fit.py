"""AutoGluon's side of `perf/autogluon.py`: fit and evaluate one fold; run in its environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Fit on the tables of a fold; write accuracies to `settings["out"]`."""
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
    scores = {name: predictor.evaluate(tables[name])["accuracy"] for name in ("val", "test")}
    Path(settings["out"]).write_text(json.dumps(scores))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
