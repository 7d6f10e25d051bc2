"""What `data` may be in the Python API: a name, a path, settings, a table, a data set."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.cells import fold
from fusionzoo.config import from_settings, split_name
from fusionzoo.config.schema import TABLE_WORDS
from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.datasets import create_dataset as open_data
from fusionzoo.datasets.media.audio import spread
from fusionzoo.datasets.media.formats import SUFFIXES
from fusionzoo.datasets.media.ranges import Range, extremes_of, is_deep, usual_range
from fusionzoo.datasets.opening.load import load_table
from fusionzoo.datasets.opening.naming import IN_MEMORY, settings_of
from fusionzoo.datasets.sources.columns import HUGGING_FACE, TEXT_TYPES
from fusionzoo.datasets.sources.in_memory import is_table, read_objects
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.datasets.tables.arrow import is_list_of_text
from fusionzoo.datasets.tables.provenance import FUSIONZOO, Loaded
from fusionzoo.datasets.tables.table import NOT_FILES, word_list
from fusionzoo.errors import FusionZooError, explained, keyword_errors
from fusionzoo.files import cache_root, make_cache_folder, replacing
from fusionzoo.structures import KINDS

from .command import R, complete_data, complete_to_train, with_targets

VAL_SHARE = 0.1  # of the training samples, where the data has no validation split
MOST_OPENED, MOST_MEASURED = 1000, 64  # training images whose header, and values, tell their range
Data = Any  # str | PathLike | Mapping | PairedDataset | a table or data set in memory
InMemory = PairedDataset | dict[str, Any] | None  # settings, whose `root` is a table of objects
C = TypeVar("C")


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
    data = read_data({**settings_of(name), **settings})
    if base:
        if not is_table(data.get("root")) and not isinstance(data.get("root"), Loaded):
            raise FusionZooError(f"base={base!r} is for tables in memory; leave it out")
        loaded = load_table(TableSettings(root=data["root"]))
        data["root"] = replace(loaded, root=Path(base))
    done = complete_data(data, _target_names(target))
    return open_data(**done.to_open)


def configure_run(
    cls: type[R],
    data: Data,
    settings: Mapping[str, Any],
    config: Any,
    targets_of: Callable[[R], Mapping[str, str] | None],
) -> tuple[R, PairedDataset | None]:
    """Return the configuration of a training or benchmark, and its data set if it is in memory.

    `settings` are keyword arguments, of the data and of the run alike.
    """
    cfg, objects = configure(cls, data, settings, config)
    if not isinstance(objects, Mapping):
        if objects is not None and cfg.target:
            raise FusionZooError(
                "target names a column of a table; a PairedDataset has its targets: targets="
            )
        return cfg, objects
    done = complete_to_train(cfg, objects)
    done.show()
    cfg = with_targets(cfg, done)
    return cfg, open_data(**{"targets": targets_of(cfg), **done.to_open})


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
) -> tuple[C, InMemory]:
    """Return the configuration of a call, and what is in memory alone: a data set, or settings
    whose `root` is a table of objects.

    `settings` are keyword arguments, of the data and of the command alike. Other tables in memory
    are stored in the cache, unless `store` is False.
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
    data = read_data(data) if store else keep_in_memory(data)
    if data is not None:
        rest["data"] = data_settings(data)
    cfg = from_settings(cls, rest, config)
    if isinstance(data, PairedDataset):
        return cfg, data
    if data is not None and isinstance(data.get("root"), Loaded):
        return cfg, {name: value for name, value in data.items() if name != "augment"}
    return cfg, None


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


def read_data(data: Data) -> Data:
    """Return `data`, or settings whose `root` is read if data is a table or data set in memory.

    What Arrow can hold becomes an Arrow table, which `data_settings` stores; images, arrays and
    data sets of other libraries stay what they are.
    """
    if isinstance(data, PairedDataset) or data is None:
        return data
    settings = settings_of(data)
    if "group" in settings:
        settings["group_column"] = settings.pop("group")
    root = settings.get("root")
    if not is_table(root) or isinstance(root, pa.Table):
        return settings
    loaded = read_objects(TableSettings(root=root, fields=settings.pop("fields", ())))
    parts = root.values() if isinstance(root, Mapping) else [root]
    is_plain = all(
        isinstance(part, list | tuple | np.ndarray) or hasattr(part, "__arrow_c_stream__")
        for part in parts
    )
    storable = is_plain and not loaded.memory and not loaded.kinds
    if storable:
        return {**settings, "root": loaded.table}
    base = settings.pop("base", None)
    return {**settings, "root": loaded if base is None else replace(loaded, root=Path(base))}


def keep_in_memory(data: Data) -> Data:
    """Return what `read_data` does, with a table as `Loaded`, which is not stored."""
    settings = read_data(data)
    if not isinstance(settings, Mapping) or not isinstance(settings.get("root"), pa.Table):
        return settings
    root = settings_of(data)["root"]
    table, settings = _with_absolute_paths(settings)
    return {**settings, "root": Loaded(table=table, source=f"the {type(root).__name__}")}


def data_settings(data: Data) -> dict[str, Any]:
    """Return the settings of a data set, as `--data` has them; `data` as of `create_dataset`.

    A table in memory is written to the cache as Parquet, so that worker processes and later
    commands can read it. A `PairedDataset`, and what Arrow cannot hold, is recorded as in memory:
    the run's config.yaml cannot open it again.
    """
    data = read_data(data)
    if isinstance(data, PairedDataset) or isinstance(data.get("root"), Loaded):
        return {"name": IN_MEMORY}
    if isinstance(data.get("root"), pa.Table):
        return store_table(data, make_cache_folder(cache_root() / "tables"))
    return dict(data)


def in_memory(data: Data) -> PairedDataset | None:
    """Return the data set, without labels, if `data` is one or cannot be stored."""
    data = read_data(data)
    if isinstance(data, PairedDataset) or data is None:
        return data
    if isinstance(data.get("root"), Loaded):
        settings = {name: value for name, value in data.items() if name != "augment"}
        return open_data(**{"targets": {}, **settings})
    return None


def store_table(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the table `settings["root"]` as a manifest into a folder; return settings to open it.

    Paths in the table start from the folder `base`, by default the working directory. The file's
    name holds the hash of its contents, so the same table is written once.
    """
    table, settings = _with_absolute_paths(settings)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    contents = buffer.getvalue()
    path = folder / f"data-{hashlib.sha256(contents).hexdigest()[:12]}.parquet"
    if not path.is_file():
        with replacing(path) as partial:
            partial.write_bytes(contents)
    return {**settings, "root": str(path)}


def _with_absolute_paths(settings: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """Return the table `settings["root"]` with absolute paths, and the settings that allow them."""
    settings = dict(settings)
    base = os.path.abspath(settings.pop("base", ""))
    with explained("the table cannot be stored", pa.ArrowException, TypeError):
        table = pa.table(settings["root"])
    metadata = table.schema.metadata or {}
    declared = {key: metadata[key] for key in (FUSIONZOO, HUGGING_FACE) if key in metadata}
    table = _absolute_structs(table.replace_schema_metadata(declared or None), base)
    for name in _path_columns(settings, table):
        cells = [_absolute(cell, base) for cell in table[name].to_pylist()]
        column = pa.array(cells, table[name].type)
        table = table.set_column(table.column_names.index(name), name, column)
    return table, {**settings, "allow_outside": True}


def _path_columns(settings: Mapping[str, Any], table: pa.Table) -> list[str]:
    """Return the text columns whose cells are paths, by the rules of the manifest or by sight."""
    columns, kinds = settings.get("columns") or {}, settings.get("kinds") or {}
    paths = word_list(settings.get("paths") or ())
    path_columns = {
        fold(columns.get(modality, modality))
        for modality in {*KINDS, *columns, *kinds}
        if modality in paths or kinds.get(modality, modality) in set(KINDS) - {*NOT_FILES}
    }
    return [
        field.name
        for field in table.schema
        if (is_list_of_text(field.type) or any(is_type(field.type) for is_type in TEXT_TYPES))
        and (fold(field.name) in path_columns or _are_files(table[field.name]))
    ]


def _are_files(column: Any) -> bool:
    """Whether all cells of a column name images or clips."""
    if is_list_of_text(column.type):
        return False
    cells = [cell for cell in column.to_pylist() if cell]
    suffixes = {Path(cell).suffix.lower() for cell in cells}
    return any(suffixes and suffixes <= {*SUFFIXES[kind]} for kind in ("image", "audio"))


def _absolute(cell: Any, base: str) -> Any:
    """Return a path, or each of a list, as an absolute one."""
    if isinstance(cell, list):
        return [_absolute(path, base) for path in cell]
    return cell and os.path.normpath(os.path.join(base, cell))


def _absolute_structs(table: pa.Table, base: str) -> pa.Table:
    """Make the paths in columns of `{bytes, path}` absolute."""
    for position, field in enumerate(table.schema):
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        names = [x.name for x in inner] if pa.types.is_struct(inner) else []
        if "path" in names:
            cells = table.column(position).to_pylist()
            structs = [x for cell in cells for x in (cell if isinstance(cell, list) else [cell])]
            for cell in structs:
                if cell and cell["path"] is not None and cell.get("bytes") is None:
                    cell["path"] = _absolute(cell["path"], base)
            table = table.set_column(position, field, pa.array(cells, field.type))
    return table


def open_dataset(
    settings: dict[str, Any],
    targets: Mapping[str, str] | None = None,
    dataset: PairedDataset | None = None,
) -> PairedDataset:
    """Open the data set that `--data.name` and its settings describe, or take one that is open;
    read these targets (None: the class in column `target`)."""
    if dataset is not None:
        return dataset if targets is None else dataset.with_targets(targets)
    name, arguments = split_name(settings, "data")
    arguments.pop("augment", None)  # of training samples: `encoders/augment.py`
    if targets is None:
        return DATASETS.create(name, **arguments)
    if "targets" in DATASETS[name].parameters:
        return DATASETS.create(name, **{**arguments, "targets": targets})
    return DATASETS.create(name, **arguments).with_targets(targets)
