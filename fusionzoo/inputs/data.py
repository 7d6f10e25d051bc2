"""What `data` may be in the Python API: a name, a path, settings, a table, a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from fusionzoo.config import from_settings
from fusionzoo.config.schema import TABLE_WORDS
from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.datasets import create_dataset as open_data
from fusionzoo.datasets.media.audio import spread
from fusionzoo.datasets.media.ranges import Range, extremes_of, is_deep, usual_range
from fusionzoo.datasets.opening.naming import settings_of
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.in_memory import is_table
from fusionzoo.errors import FusionZooError, keyword_errors

from .command import R, complete_data

VAL_SHARE = 0.1  # of the training samples, where the data has no validation split
MOST_OPENED, MOST_MEASURED = 1000, 64  # training images whose header, and values, tell their range
Data = Any  # str | PathLike | Mapping | PairedDataset | a table or data set in memory


class CommandSettings(Protocol):
    """Settings of a command that is about data."""

    @property
    def data(self) -> dict[str, Any]:
        """The data's settings."""
        ...


C = TypeVar("C", bound=CommandSettings)


@keyword_errors
def create_dataset(
    name: Data, *, target: str | Sequence[str] = (), base: str = "", **settings: Any
) -> PairedDataset:
    """Open a data set by name, or your own data: `create_dataset(df, target="diagnosis")`.

    `name` is the name of a data set (`fusionzoo data list` shows names and settings), a path, or
    what is in memory, with the settings of `manifest`: a DataFrame, an Arrow table, a list of
    dicts, a dict of columns, a Hugging Face `Dataset` or `DatasetDict`, a PyTorch data set of
    dicts. Cells may be PIL images, arrays, bytes, `(samples, rate)`, text and lists; they are
    decoded on access. Paths in a table in memory start from `base`, by default the working
    directory. With `target`, the column of labels or several, every other column is read as what
    it holds; without, as the settings `columns` and `kinds` say.
    """
    has_target = not isinstance(target, Sequence) or len(target) > 0
    if isinstance(name, PairedDataset) or not (has_target or base or "group" in settings):
        return open_data(name, **settings)
    named = {**settings_of(name), **settings}
    if base:
        if not is_table(named.get("root")):
            raise FusionZooError(f"base={base!r} is for tables in memory; leave it out")
        named["base"] = base
    return complete_data(DataSpec.of(named), _target_names(target)).open()


def _target_names(target: Any) -> str | list[str]:
    """Return names of columns as text; numbers are names in some DataFrames."""
    if isinstance(target, str | int):
        return str(target)
    if isinstance(target, list | tuple) and all(isinstance(x, str | int) for x in target):
        return [str(x) for x in target]
    raise FusionZooError(
        f"target is of type {type(target).__name__}; it is the name of a column of the table, or a"
        " list of names: add values as a column"
    )


def configure(
    cls: type[C], data: Data, settings: Mapping[str, Any], config: Any = None, *, store: bool = True
) -> tuple[C, DataSpec]:
    """Return the configuration of a call, and the data that it is about.

    `settings` are keyword arguments, of the data and of the command alike. Tables in memory are
    stored in the cache where they can be, unless `store` is False.
    """
    if "target" in settings:
        settings = {**settings, "target": _target_names(settings["target"])}
    encoders = settings.get("encoders")
    for name, encoder in encoders.items() if isinstance(encoders, Mapping) else ():
        if hasattr(encoder, "forward"):
            raise FusionZooError(
                f"encoders={{{name!r}: ...}} is a module: training builds an encoder anew, from its"
                " recipe and in other processes. Register its class by fusionzoo.register and give"
                " the name; embed and create_model take modules"
            )
    data, rest = sort_settings(cls, data, settings)
    spec = DataSpec.of(data, store=store)
    if data is not None:
        rest["data"] = spec.recorded
    cfg = from_settings(cls, rest, config)
    return cfg, spec if spec.is_in_memory else DataSpec(settings=cfg.data)


def sort_settings(
    cls: type, data: Data, settings: Mapping[str, Any]
) -> tuple[Data, dict[str, Any]]:
    """Divide keyword arguments into the data's, which are merged over `data`, and the others.

    A name that is a setting of both is an error, unless `data` itself says the data's.
    """
    of_run = {setting.name for setting in fields(cls)}
    named = dict(data) if isinstance(data, Mapping) and "name" in data else {"name": data}
    name = named["name"]
    parameters: set[str] = set()
    if isinstance(name, str) and name in DATASETS:
        parameters = {*DATASETS[name].parameters} - {"root", "targets", *(of_run & named.keys())}
    words = {x: value for x, value in settings.items() if x in parameters or x in TABLE_WORDS}
    for word in words:
        if word in of_run:
            raise FusionZooError(
                f"{word} is a setting of the data set {name!r} and of this function: write the"
                f" data's as data={{'name': {name!r}, {word!r}: ...}}"
            )
    rest = {x: value for x, value in settings.items() if x not in words}
    if not words or data is None:
        return data, {**rest, **words}  # of the data that a recipe or a model names
    if isinstance(data, PairedDataset):
        return open_data(data, **words), rest
    return {**settings_of(data), **words}, rest


def with_validation(cfg: R, dataset: PairedDataset) -> tuple[R, PairedDataset]:
    """Hold out a tenth of the training samples where the data has no validation split; the settings
    say so, for whoever opens the data again."""
    if "val" in dataset.splits or "train" not in dataset.splits:
        return cfg, dataset
    held_out = dataset.hold_out(VAL_SHARE)
    return replace(cfg, data={**cfg.data, "val_share": VAL_SHARE}), held_out


def with_image_range(cfg: R, dataset: PairedDataset) -> tuple[R, PairedDataset]:
    """Learn which values are black and white in images of more than 8 bits, of modalities for which
    the settings do not say it; the settings say so, for the model and whoever opens the data again.
    """
    setting = dataset.image_range
    if setting is not None and not isinstance(setting, Mapping):
        return cfg, dataset
    ranges: dict[str, Any] = dict(setting or {})
    for name in ranges:
        dataset.check_modality(name)
    for name, kind in dataset.modalities.items():
        if kind == "image" and name not in ranges and (pair := _learn_range(dataset, name)):
            ranges[name] = list(pair)
    if len(ranges) == len(setting or {}):
        return cfg, dataset
    return replace(cfg, data={**cfg.data, "image_range": ranges}), dataset.with_policy(
        image_range=ranges
    )


def _learn_range(dataset: PairedDataset, name: str) -> Range | None:
    """Return the range of a modality's training images; None: none of them has more than 8 bits.

    Of at most `MOST_OPENED` images the header is read, and of `MOST_MEASURED` of those with more
    bits the values: evenly spaced ones, or the first of shards.
    """
    train = dataset.split("train") if "train" in dataset.splits else dataset
    column = [*dataset.modalities].index(name)
    rows = train.rows[train.present[:, column]].tolist()
    rows = rows[:MOST_MEASURED] if train.blocking() else spread(rows, MOST_OPENED)
    values = [dataset.reference(name, row) for row in rows]
    items = [x for value in values for x in (value if isinstance(value, list) else [value])]
    deep = spread([x for x in items if is_deep(x)], MOST_MEASURED)
    extremes = [x for item in deep if (x := extremes_of(item)) is not None]
    if not extremes:
        return None
    lowest, highest = zip(*extremes, strict=True)
    return usual_range(min(lowest), max(highest))
