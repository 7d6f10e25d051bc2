"""`fusionzoo data convert`: write a data set as shards, or a pickle of features as a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import PLUGINS, TARGET, Count, option
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.console import command_line
from fusionzoo.ground.plugins import load_plugins

HELP = """
Turn a data set into shards: `fusionzoo data convert my.csv shards/ --prepare`.

DATA is a data set's name, a file, a folder, or a pickle of features (MMSA), of which a
manifest and arrays are written, and nothing in it is run. OUT is a folder. A conversion that was
stopped goes on with the same command.
"""
PICKLES = (".pkl", ".pickle")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Settings of `fusionzoo data convert`."""

    data: Tree = option({}, "data set and its settings, or a pickle (required)")
    target: str | list[str] = option("", TARGET)
    out: str = option("", "folder to write (required)")
    plugins: str | list[str] = option("", PLUGINS)
    format: Literal["parquet", "webdataset"] = option("parquet", "of the shards")
    prepare: bool = option(False, "store images at 256 px and audio as FLAC at 16 kHz")
    shard_mb: Count = option(256, "MB of a shard")
    nonfinite: Literal["raise", "zero"] = option(
        "raise", "features of a pickle that are infinite or NaN: an error, or zeros"
    )


def convert_command(args: Sequence[str]) -> int:
    """Run `fusionzoo data convert DATA OUT ...`; return its exit code."""
    return run_command(ConvertConfig, HELP, args, _convert, words=("data", "out"))


def convert(data: Any, out: str | Path, **settings: Any) -> Any:
    """Write what `create_dataset` opens as shards: `convert("my.csv", "shards", prepare=True)`.

    Settings: `format` ("parquet" or "webdataset"), `prepare`, `shard_mb`, `progress`; others are
    those of the data set. A stream of Hugging Face is written as it comes, whatever its length.
    """
    from fusionzoo.datasets import create_dataset
    from fusionzoo.datasets.shards.write import Settings, write_shards, write_stream
    from fusionzoo.datasets.tables.hugging_face import is_hugging_face, is_stream

    progress = settings.pop("progress", False)
    names = ("format", "prepare", "shard_mb", "block_mb")
    chosen = {name: settings.pop(name) for name in names if name in settings}
    if is_hugging_face(data) and is_stream(data):
        if settings or set(chosen) - {"shard_mb"}:
            raise FusionZooError("a stream takes shard_mb alone of the settings")
        return write_stream(data, Path(out).expanduser(), progress=progress, **chosen)
    dataset = create_dataset(data, **settings)
    return write_shards(dataset, Path(out).expanduser(), Settings(**chosen), progress=progress)


def _convert(cfg: ConvertConfig) -> int:
    if not cfg.data or not cfg.out:
        raise FusionZooError("two words come first: fusionzoo data convert DATA OUT")
    from fusionzoo.inputs.command import complete_data

    load_plugins(cfg.plugins)
    name = str(cfg.data.get("name", ""))
    if Path(name).suffix.lower() in PICKLES:
        from .pickles import convert_pickle

        converted = convert_pickle(Path(name), Path(cfg.out), nonfinite=cfg.nonfinite)
        print("\n".join(converted.notes))
        print(f"wrote   {converted.manifest}")
        print(f"next    {command_line('train')} {converted.manifest}")
        return 0
    spec = complete_data(DataSpec(settings=cfg.data), cfg.target)
    spec.show()
    settings = spec.settings
    options = {name: getattr(cfg, name) for name in ("format", "prepare", "shard_mb")}
    written = convert(settings, cfg.out, **options, progress=True)
    resumed = f", {written.resumed} of them there already" if written.resumed else ""
    print(
        f"wrote   {written.samples:,} samples, {written.bytes / 1e6:,.1f} MB in {written.files:,}"
        f" shards{resumed}: {written.folder}"
    )
    if written.failed:
        print(f"missing {written.failed:,} values that cannot be read (--data.on_error)")
    kinds = settings.get("targets", {})  # shards store the labels, not what they are
    named = (pair for pair in kinds.items() if pair[1] != "classification")
    flags = "".join(f" --targets.{name} {kind}" for name, kind in named)
    print(f"next    {command_line('train')} {written.folder}{flags}")
    return 0
