"""`fusionzoo data convert`: write a data set as shards, or a pickle of features as a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fusionzoo.config import merge
from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import Count, option
from fusionzoo.errors import FusionZooError
from fusionzoo.plugins import load_plugins

HELP = """
Turn a data set into shards: `fusionzoo data convert my.csv shards/ --prepare`.

SOURCE is a data set's name, a manifest, a folder, or a pickle of features (MMSA), of which a
manifest and arrays are written, and nothing in it is run. OUT is a folder. A conversion that was
stopped goes on with the same command.
"""
PICKLES = (".pkl", ".pickle")
PLUGINS = "files or modules with components of your own, `my_data.py`: docs/plugins.md"


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Settings of `fusionzoo data convert`."""

    source: str = option("", "a data set's name, a manifest, a folder or a pickle (required)")
    out: str = option("", "folder to write (required)")
    data: Tree = option({}, "settings of the data set, as in train.py: --data.<setting>")
    plugins: str | list[str] = option("", PLUGINS)
    format: Literal["parquet", "webdataset"] = option("parquet", "of the shards")
    prepare: bool = option(False, "store images at 256 px and audio as FLAC at 16 kHz")
    shard_mb: Count = option(256, "MB of a shard")
    nonfinite: Literal["raise", "zero"] = option(
        "raise", "features of a pickle that are infinite or NaN: an error, or zeros"
    )


def convert_command(args: Sequence[str]) -> int:
    """Run `fusionzoo data convert SOURCE OUT ...`; return its exit code."""
    return run_command(ConvertConfig, HELP, places_first(args), _convert)


def places_first(args: Sequence[str]) -> list[str]:
    """Write source and folder as flags where they are the first words.

    >>> places_first(["my.csv", "shards", "--prepare"])
    ['--source=my.csv', '--out=shards', '--prepare']
    """
    words = list(args)
    for position, flag in enumerate(("--source", "--out")):
        if position < len(words) and not words[position].startswith("-"):
            words[position] = f"{flag}={words[position]}"
        else:
            break
    return words


def convert(data: Any, out: str | Path, **settings: Any) -> Any:
    """Write what `create_dataset` opens as shards: `convert("my.csv", "shards", prepare=True)`.

    Settings: `format` ("parquet" or "webdataset"), `prepare`, `shard_mb`, `progress`; others are
    those of the data set. A stream of Hugging Face is written as it comes, whatever its length.
    """
    from fusionzoo.datasets import create_dataset
    from fusionzoo.datasets.hugging_face import is_hugging_face, is_stream
    from fusionzoo.datasets.shards.write import Settings, write_shards, write_stream

    progress = settings.pop("progress", False)
    names = ("format", "prepare", "shard_mb", "block_mb")
    chosen = {name: settings.pop(name) for name in names if name in settings}
    if is_hugging_face(data) and is_stream(data):
        if settings or set(chosen) - {"shard_mb"}:
            raise FusionZooError(
                "a stream is written as it comes: of the settings it takes shard_mb alone"
            )
        return write_stream(data, Path(out).expanduser(), progress=progress, **chosen)
    dataset = create_dataset(data, **settings)
    return write_shards(dataset, Path(out).expanduser(), Settings(**chosen), progress=progress)


def _convert(cfg: ConvertConfig) -> int:
    if not cfg.source or not cfg.out:
        raise FusionZooError("two words come first: fusionzoo data convert SOURCE OUT")
    load_plugins(cfg.plugins)
    if Path(cfg.source).suffix.lower() in PICKLES:
        _convert_pickle(cfg)
        return 0
    settings = _settings(cfg.source, cfg.data)
    written = convert(
        settings,
        cfg.out,
        format=cfg.format,
        prepare=cfg.prepare,
        shard_mb=cfg.shard_mb,
        progress=True,
    )
    resumed = f", {written.resumed} of them there already" if written.resumed else ""
    print(
        f"wrote   {written.samples:,} samples, {written.bytes / 1e6:,.1f} MB in {written.files:,}"
        f" shards{resumed}: {written.folder}"
    )
    if written.failed:
        print(f"missing {written.failed:,} values that cannot be read (--data.on_error)")
    print(f"next    python train.py --data.name manifest --data.root {written.folder}")
    return 0


def _convert_pickle(cfg: ConvertConfig) -> None:
    """Convert a pickle, and print what was written."""
    from fusionzoo.datasets.pickles import convert_pickle

    converted = convert_pickle(Path(cfg.source), Path(cfg.out), nonfinite=cfg.nonfinite)
    print("\n".join(converted.notes))
    print(f"wrote   {converted.manifest}")
    print(f"next    python train.py --data.name manifest --data.root {converted.manifest}")


def _settings(source: str, data: Mapping[str, Any]) -> Tree:
    """Return the settings of the source, with the flags over them."""
    from fusionzoo.datasets.naming import settings_of

    return merge(settings_of(source), data)
