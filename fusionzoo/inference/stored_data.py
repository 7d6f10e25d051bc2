"""Which data to read where the user names none: those that the model was trained on."""

from __future__ import annotations

from pathlib import Path

from fusionzoo.config import merge, read_yaml
from fusionzoo.config.flags import Tree
from fusionzoo.datasets import DATASETS
from fusionzoo.datasets.naming import IN_MEMORY
from fusionzoo.errors import FusionZooError
from fusionzoo.trained_on import TrainedOn


def data_settings_of(given: Tree, model: str, trained_on: TrainedOn | None) -> Tree:
    """Return a data set's settings: those given or, without a name, merged over the stored ones.

    Stored are those of the model or, of a run folder of an earlier version, in its config.yaml.
    """
    if given.get("name"):
        return dict(given)
    recipe = Path(model) / "config.yaml"
    run = read_yaml(recipe) if model and recipe.is_file() else {}
    stored = run.get("data") or (trained_on and trained_on.settings)
    if not stored:
        known = f"{model} does not say" if model else "the model does not say"
        raise FusionZooError(
            f"--data.name is missing: a data set, or manifest for a file; {known} what it was"
            " trained on"
        )
    settings = merge(stored, given)
    settings.pop("augment", None)  # of training samples
    if settings["name"] == IN_MEMORY:
        raise FusionZooError("--data.name is missing: the model was trained on data in memory")
    if run.get("plugins") and settings["name"] not in DATASETS:
        raise FusionZooError(
            f"unknown data set {settings['name']!r}: the run was trained with --plugins"
            f" {run['plugins']}, which is not imported unless it is given here too"
        )
    return settings
