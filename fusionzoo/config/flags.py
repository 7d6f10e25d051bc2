"""Command-line flags and YAML files, read into nested mappings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .yaml_tree import check_tree

Tree = dict[str, Any]
MAX_BYTES = 1 << 22  # of a configuration file
COMPONENTS = ("data", "fusion", "objective")  # a name and its settings
COMPONENT_GROUPS = ("encoders", "targets")  # components by modality, by column


def parse_flags(args: Sequence[str]) -> Tree:
    """Turn `--a.b 1 --c=x --flag` into `{"a": {"b": 1}, "c": "x", "flag": True}`.

    >>> parse_flags(["--optim.lr", "1e-3", "--data.name=stamps", "--resume"])
    {'optim': {'lr': 0.001}, 'data': {'name': 'stamps'}, 'resume': True}
    """
    tree: Tree = {}
    words = list(args)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise FusionZooError(f"expected a flag such as --train.epochs 5, found {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = words.pop(0) if words and not _is_flag(words[0]) else "true"
        _set(tree, key, parse_value(text))
    return tree


def _set(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key; a component's bare name (`--fusion gmu`) merges with its settings."""
    branch = tree
    *path, leaf = key.split(".")
    for depth, part in enumerate(path, start=1):
        if isinstance(branch.get(part), str) and is_component(path[:depth]):
            branch[part] = {"name": branch[part]}
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            raise FusionZooError(f"--{key}: an earlier flag sets {part!r} itself to a value")
    if (
        isinstance(branch.get(leaf), dict)
        and isinstance(value, str)
        and is_component([*path, leaf])
    ):
        branch[leaf]["name"] = value
    else:
        branch[leaf] = value


def is_component(path: Sequence[str]) -> bool:
    """Whether a key holds a component (`--fusion`, `--encoders.image`): a string is its name."""
    if len(path) == 2:
        return path[0] in COMPONENT_GROUPS
    return len(path) == 1 and path[0] in COMPONENTS


def named(tree: Mapping[str, Any], path: Sequence[str] = ()) -> Tree:
    """Expand each component written as a string to `{"name": string}`.

    >>> named({"fusion": "gmu", "encoders": {"text": "chars"}, "out": "a"})
    {'fusion': {'name': 'gmu'}, 'encoders': {'text': {'name': 'chars'}}, 'out': 'a'}
    """
    out: Tree = {}
    for key, value in tree.items():
        if isinstance(value, str) and is_component([*path, key]):
            value = {"name": value}
        elif isinstance(value, Mapping) and not path:
            value = named(value, [key])
        out[key] = value
    return out


def parse_value(text: str) -> Any:
    """Read a flag's value: a number, true, false, null, a [list] or {mapping}, else a string.

    >>> [parse_value(x) for x in ("1e-4", "no", "true", "[fr, en]", "null")]
    [0.0001, 'no', True, ['fr', 'en'], None]
    """
    if text[:1] in ("[", "{"):
        return _load_yaml(text, f"cannot read the value {text!r}", f"the value {text!r}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of more than 4300 digits is a ValueError, too
        return text


def recipes() -> dict[str, Path]:
    """Return the YAML files that come with fusionzoo, by name: `stamps`, `benchmarks/stamps`."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    folder = installed if installed.is_dir() else package.parent / "configs"  # of a checkout
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def config_file(name: str | PathLike[str]) -> Path:
    """Return the file that `--config` names: a path, or else a recipe."""
    path, known = Path(name), recipes()
    if path.is_file():
        return path
    if path.as_posix() in known:
        return known[path.as_posix()]
    near = did_you_mean(path.with_suffix("").as_posix().removeprefix("configs/"), known)
    raise FusionZooError(
        f"no configuration file {path}, and no recipe of that name.{near} Recipes:"
        f" {', '.join(known)}."
    )


def read_yaml(path: Path) -> Tree:
    """Read settings from a YAML file."""
    if not path.is_file():
        raise FusionZooError(f"no configuration file {path}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from None
    tree = _load_yaml(text, f"{path} is not YAML", str(path)) or {}
    if not isinstance(tree, dict):
        raise FusionZooError(f"{path} must hold a mapping of settings")
    return tree


def _load_yaml(text: str, problem: str, source: str) -> Any:
    """Read YAML, with `1e-4` as a number; duplicate keys and multiplying aliases are errors."""
    import yaml

    try:
        check_tree(yaml.compose(text, yaml.SafeLoader), source)
        return _numbers(yaml.safe_load(text))
    except FusionZooError:
        raise
    except RecursionError:
        raise FusionZooError(f"{problem}: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: dates such as 2001-99-99
        raise FusionZooError(f"{problem}: {one_line(error)}") from None


def _is_flag(word: str) -> bool:
    return bool(re.match(r"--[A-Za-z]", word))


def _numbers(tree: Any) -> Any:
    """Read `1e-4` as a number, which YAML 1.1 does not."""
    if isinstance(tree, dict):
        return {str(key): _numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_numbers(value) for value in tree]
    if isinstance(tree, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", tree):
        return float(tree)
    return tree
