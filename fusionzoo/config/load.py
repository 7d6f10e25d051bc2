"""Build a configuration from YAML files and command-line flags. Nothing heavy is imported here.

`python train.py --config a.yaml --optim.lr 1e-3 --fusion.name mbt`: flags win over the file, the
file wins over the defaults. The sections `data`, `fusion`, `objective`, `targets.<column>` and
`encoders.<modality>` name a registry entry; what else they hold are keyword arguments of that
entry's constructor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from fusionzoo.errors import FusionZooError, did_you_mean

from .flags import Tree, is_component, named, parse_flags, read_yaml

C = TypeVar("C")


def from_args(cls: type[C], args: Sequence[str]) -> C:
    """Build a configuration of type `cls` from command-line flags and the files they name."""
    flags = _named(cls, parse_flags(args))
    config_file = flags.pop("config", None)
    tree = {} if config_file is None else _named(cls, read_yaml(Path(str(config_file))))
    if flags.get("resume"):
        tree = _resumed(flags, tree, config_file is not None)
    return _overlay(cls, tree, flags)


def _resumed(settings: Mapping[str, Any], tree: Mapping[str, Any], has_config: bool) -> Tree:
    """Return the settings of the run to continue: its config.yaml, unless another one is given."""
    if not (settings.get("out") or tree.get("out")):
        raise FusionZooError("--resume needs --out: the folder of the run to continue")
    if has_config:
        return dict(tree)
    stored = Path(str(settings["out"])) / "config.yaml"
    return read_yaml(stored) if settings["resume"] != "auto" or stored.is_file() else {}


def from_settings(
    cls: type[C],
    settings: Mapping[str, Any],
    config: C | Mapping[str, Any] | str | PathLike[str] | None = None,
) -> C:
    """Build a configuration from settings by name, as `from_args` does from flags.

    A setting of a section may stand alone where no other has its name: `epochs=3` is
    `train={"epochs": 3}`, that is `--train.epochs 3`. Settings override those of `config`: a
    configuration, a nested mapping or the path of a YAML file.
    """
    if isinstance(config, cls):
        tree: Mapping[str, Any] = asdict(config)  # type: ignore[call-overload]
    elif isinstance(config, Mapping):
        tree = config
    else:
        tree = {} if config is None else read_yaml(Path(config))  # type: ignore[arg-type]
    tree, settings = _paths_as_text(tree), _in_sections(cls, _paths_as_text(settings))
    if settings.get("resume"):
        tree = _resumed(settings, tree, config is not None)
    return _overlay(cls, tree, settings)


def _paths_as_text(value: Any) -> Any:
    """Write paths as text, as the command line would give them."""
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {key: _paths_as_text(below) for key, below in value.items()}
    return [_paths_as_text(below) for below in value] if isinstance(value, list) else value


def _in_sections(cls: type, settings: Mapping[str, Any]) -> Tree:
    """Put each setting into its section, `{"epochs": 3}` into `{"train": {"epochs": 3}}`."""
    top_level = {one.name for one in fields(cls)}
    known = _leaves(cls)
    tree: Tree = {}
    for name, value in settings.items():
        key = name if name in top_level else _dotted_key(name, known)
        section, _, leaf = key.rpartition(".")
        tree = merge(tree, {section: {leaf: value}} if section else {leaf: value})
    return tree


def _dotted_key(name: str, known: Mapping[str, bool]) -> str:
    """Return the dotted key of a setting given by its last part."""
    keys = [key for key in known if key.rpartition(".")[2] == name]
    if len(keys) == 1:
        return keys[0]
    if keys:
        sections = " or ".join(f"{key.partition('.')[0]}={{{name!r}: ...}}" for key in keys)
        raise FusionZooError(f"{name}: several settings have this name; give {sections}")
    return name  # refused, with the nearest name, where all settings are checked


def _overlay(cls: type[C], tree: Mapping[str, Any], settings: Mapping[str, Any]) -> C:
    hints = get_type_hints(cls)
    sections = [one.name for one in fields(cls) if is_dataclass(hints[one.name])]  # type: ignore[arg-type]
    return from_tree(cls, merge(_named(cls, tree), _named(cls, settings), sections))


def from_tree(cls: type[C], tree: Mapping[str, Any]) -> C:
    """Validate a nested mapping and build `cls` from it; one clear line says what is wrong."""
    from pydantic import TypeAdapter, ValidationError

    known = _leaves(cls)
    tree = _named(cls, tree)
    _refuse_unknown(tree, known, "")
    _check_numbers(cls, tree)
    components = {key: value for key, value in asdict(cls()).items() if known.get(key)}  # type: ignore[call-overload]
    try:
        return TypeAdapter(cls).validate_python(merge(components, tree))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise FusionZooError(f"--{key} {first['input']!r}: {reason}") from None


def write_yaml(config: Any, path: Path) -> None:
    """Write a complete, resolved configuration."""
    import yaml

    tree = json.loads(json.dumps(asdict(config)))
    partial = path.with_suffix(".partial")  # a kill leaves the old file or the new one
    partial.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    partial.replace(path)


def merge(base: Mapping[str, Any], over: Mapping[str, Any], sections: Sequence[str] = ()) -> Tree:
    """Lay `over` on `base`; a component with another name does not inherit the old settings.

    `sections` are none: of the optimiser, another name leaves all but what stands in `settings`.
    """
    out = {} if _renamed(base, over) else dict(base)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            if key in sections and _renamed(below, value):
                below = {k: x for k, x in below.items() if k not in ("name", "settings")}
            value = merge(below, value)
        out[key] = value
    return out


def _renamed(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return "name" in over and "name" in base and over["name"] != base["name"]


def split_name(component: Mapping[str, Any], what: str) -> tuple[str, Tree]:
    """Split `{"name": n, **settings}`; a component without a name is an error."""
    settings = dict(component)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise FusionZooError(f"{what} has no name: give --{what}.name")
    return name, settings


def _leaves(cls: Any, prefix: str = "") -> dict[str, bool]:
    """Map each dotted key to whether it may hold keys of its own."""
    found: dict[str, bool] = {}
    hints = get_type_hints(cls)
    for one in fields(cls):
        key, hint = prefix + one.name, hints[one.name]
        if is_dataclass(hint):
            found |= _leaves(hint, f"{key}.")
        else:
            found[key] = getattr(hint, "__origin__", None) is dict
    return found


def _refuse_unknown(tree: Mapping[str, Any], known: Mapping[str, bool], prefix: str) -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in known:
            if known[key] and not isinstance(value, Mapping):
                raise FusionZooError(f"--{key} holds settings: give --{key}.<setting> {value}")
            continue
        if not any(leaf.startswith(f"{key}.") for leaf in known):
            raise FusionZooError(
                f"unknown setting --{key}.{_nearest_flag(key, known)} --help lists all of them."
            )
        if not isinstance(value, Mapping):
            raise FusionZooError(f"--{key} is a group of settings: give --{key}.<setting> {value}")
        _refuse_unknown(value, known, f"{key}.")


def _nearest_flag(key: str, known: Mapping[str, bool]) -> str:
    """Suggest the flag with the same last part, else with the nearest one."""
    sections = {leaf.rpartition(".")[0] for leaf in known} - {""}
    flags = [*known, *sorted(sections)]
    if "." not in key:
        leaves = {flag.rpartition(".")[2]: flag for flag in reversed(flags)}
        near = get_close_matches(key, leaves, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {'--' + leaves[near[0]]!r}?"
    return did_you_mean(f"--{key}", [f"--{flag}" for flag in flags])


def _named(cls: Any, tree: Mapping[str, Any]) -> Tree:
    """Write components given by a word as mappings, unless this field holds no component."""
    plain = {
        one.name
        for one in fields(cls)
        if is_component([one.name])
        and one.default_factory is not MISSING
        and "name" not in (one.default_factory() or {"name": ""})
    }
    return {**named(tree), **{key: tree[key] for key in plain & tree.keys()}}


def _check_numbers(cls: Any, tree: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what would pass as a number: yes and no, infinity, and a flag without its value."""
    hints = get_type_hints(cls, include_extras=True)
    for name, value in tree.items():
        if is_dataclass(hints[name]):
            _check_numbers(hints[name], value, f"{prefix}{name}.")
            continue
        for key, leaf in _walk(value, f"{prefix}{name}"):
            if isinstance(leaf, bool) and not _takes_bool(hints[name]):
                raise FusionZooError(
                    f"--{key} {str(leaf).lower()}: it needs a value of another kind"
                    " (a flag without a value means true)"
                )
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise FusionZooError(f"--{key} {leaf}: it must be a finite number")


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _walk(below, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _walk(below, key)
    else:
        yield key, value


def _takes_bool(hint: Any) -> bool:
    """Whether a type holds true or false; what settings of a component hold, that checks."""
    if hint is bool or hint is Any or isinstance(hint, bool):
        return True
    return any(_takes_bool(part) for part in get_args(hint))
