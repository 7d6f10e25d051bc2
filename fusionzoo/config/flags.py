"""Command-line flags and YAML files, read into nested mappings and checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fusionzoo.errors import FusionZooError, did_you_mean, explained

MAX_VALUES = 100_000  # in a document, with its aliases replaced by what they refer to
Tree = dict[str, Any]
MAX_BYTES = 1 << 22  # of a configuration file
COMPONENTS = ("data", "fusion", "objective")  # a name and its settings
COMPONENT_GROUPS = ("encoders", "targets")  # components by modality, by column
OF_COLUMNS = ("kinds", "columns")  # settings of data whose keys are names, of columns too
TARGET_KINDS = ("classification", "regression", "ordinal", "multilabel")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}  # seconds
PAPERS = "papers/"  # the folder of configs/ whose files are no recipes
# Numbers that YAML 1.1 takes for text: for PyYAML, a tag, its pattern, first characters.
EXPONENT = (
    *("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")),
    list("-+0123456789"),
)
NO = "none"  # the one word for "no"; `off`, `false` and `null` are taken for it where it fits


def _count_values(node: Any, source: str, counts: dict[int, int], above: set[int]) -> int:
    """Return the number of values below a node; `above` are the nodes that contain it.

    Raise an error for a duplicate key, of which YAML's own loader keeps the last value, an alias to
    itself, or aliases that multiply: ten lines of aliases of aliases may stand for more values than
    memory holds ("billion laughs").
    """
    import yaml

    if not isinstance(node, yaml.CollectionNode):
        _refuse_other_bases(node, source)
        return 1
    if id(node) in counts:  # an alias
        return counts[id(node)]
    if id(node) in above:
        raise FusionZooError(f"{source}, line {_line(node)}: an alias refers to its own value")
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, source)
        children = [child for pair in node.value for child in pair]
    else:
        children = node.value
    above.add(id(node))
    count = 1 + sum(_count_values(child, source, counts, above) for child in children)
    above.remove(id(node))
    if count > MAX_VALUES:
        raise FusionZooError(
            f"{source}, line {_line(node)}: with its aliases replaced, it has {count:,} values; at"
            f" most {MAX_VALUES:,} are read"
        )
    counts[id(node)] = count
    return count


def _refuse_other_bases(scalar: Any, source: str) -> None:
    """Refuse `1:30` and `010`, which YAML 1.1 reads as 90 and 8."""
    word = scalar.value
    if scalar.tag.endswith((":int", ":float")) and re.match(r"[-+]?0[0-7_]+$|.*:", word):
        raise FusionZooError(
            f"{source}, line {_line(scalar)}: YAML reads {word} as a number to base"
            f" {60 if ':' in word else 8}: write it as a plain number, or as text in quotes"
        )


def _refuse_duplicates(mapping: Any, source: str) -> None:
    import yaml

    first: dict[str, int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in first:
            raise FusionZooError(
                f"{source}, line {_line(key)}: duplicate key {key.value!r}; the first is in line"
                f" {first[key.value]}"
            )
        first[key.value] = _line(key)


def _line(node: Any) -> int:
    line: int = node.start_mark.line
    return line + 1


def parse_flags(args: Sequence[str], names: Sequence[str] = ()) -> Tree:
    """Turn `--a.b 1 --c=x --flag` into `{"a": {"b": 1}, "c": "x", "flag": True}`.

    Words without a flag are the settings `names`, in this order.

    >>> parse_flags(["--optim.lr", "1e-3", "--data.name=stamps", "--resume"])
    {'optim': {'lr': 0.001}, 'data': {'name': 'stamps'}, 'resume': True}
    >>> parse_flags(["runs/a", "my.csv", "--split", "val"], ["model", "data"])
    {'model': 'runs/a', 'data': 'my.csv', 'split': 'val'}
    """
    tree: Tree = {}
    words, names = list(args), list(names)
    while words:
        word = words.pop(0)
        if not word.startswith("-") and names:
            _set(tree, names.pop(0), word)
            continue
        if not word.startswith("--") or word == "--":
            raise FusionZooError(f"expected a flag such as --train.epochs 5, found {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = words.pop(0) if words and not re.match(r"--[A-Za-z]", words[0]) else "true"
        _set(tree, key, parse_value(text))
    return tree


def _set(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key; a component's bare name (`--fusion gmu`) merges with its settings."""
    branch = tree
    *path, leaf = _parts(key, value)
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


def _parts(key: str, value: Any) -> list[str]:
    """Divide a key at its dots, but not within the name of a column.

    >>> _parts("data.kinds.home.dest", "none"), _parts("optim.lr", 1)
    (['data', 'kinds', 'home.dest'], ['optim', 'lr'])
    """
    parts = key.split(".")
    start = 1 + (parts[0] == "data")  # where a column's name begins
    of_target = parts[0] == "targets" and value in TARGET_KINDS and parts[-1] != "name"
    of_column = ".".join(parts[:start]).removeprefix("data.") in OF_COLUMNS
    if not (parts[start:] and (of_target or of_column)):
        return parts
    return [*parts[:start], ".".join(parts[start:])]


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
    """Return the recipes that come with fusionzoo, by name: `stamps`, `benchmarks/stamps`."""
    return {name: file for name, file in _shipped().items() if not name.startswith(PAPERS)}


def papers() -> dict[str, Path]:
    """Return the files of papers that `fusionzoo reproduce` knows, by name: `tmc-handwritten`."""
    files = _shipped().items()
    return {name.removeprefix(PAPERS): file for name, file in files if name.startswith(PAPERS)}


def _shipped() -> dict[str, Path]:
    """Return the YAML files that come with fusionzoo, by their path without the suffix."""
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
    with explained(f"{path} cannot be read", OSError, ValueError):
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    tree = _load_yaml(text, f"{path} is not YAML", str(path)) or {}
    if not isinstance(tree, dict):
        raise FusionZooError(f"{path} must hold a mapping of settings")
    return tree


@cache
def yaml_loader() -> Any:
    """Return PyYAML's safe loader, but that `1e-4` is a number, and keys are text as written."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            self.flatten_mapping(node)
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(None, None, "a key must be text", key.start_mark)
            return {key.value: self.construct_object(x, deep=deep) for key, x in node.value}

    Loader.add_implicit_resolver(*EXPONENT)
    return Loader


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Write settings so that they are read as they are: text that looks like `1e3` is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_implicit_resolver(*EXPONENT)
    return str(yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def _load_yaml(text: str, problem: str, source: str) -> Any:
    """Read YAML; duplicate keys and multiplying aliases are errors."""
    import yaml

    with (  # ValueError: dates such as 2001-99-99
        explained(problem, yaml.YAMLError, ValueError),
        explained(f"{problem}: it is nested too deeply", RecursionError),
    ):
        _count_values(yaml.compose(text, yaml.SafeLoader), source, {}, set())
        return yaml.load(text, yaml_loader())


@cache
def hints_of(cls: Any, *, with_bounds: bool = False) -> Mapping[str, Any]:
    """Return the types of a class's settings, with the bounds of numbers if asked for."""
    return get_type_hints(cls, include_extras=with_bounds)


def check_numbers(cls: Any, tree: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what pydantic would take as a number: booleans, infinity, a flag without a value."""
    hints = hints_of(cls, with_bounds=True)
    for name, value in tree.items():
        if is_dataclass(hints[name]):
            check_numbers(hints[name], value, f"{prefix}{name}.")
            continue
        for key, leaf in _walk(value, f"{prefix}{name}"):
            if isinstance(leaf, bool) and not _takes_bool(hints[name]):
                raise FusionZooError(
                    f"--{key} {str(leaf).lower()}: it needs a value of another kind"
                    " (a flag without a value means true)"
                )
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise FusionZooError(f"--{key} {leaf}: it must be a finite number")


def in_seconds(duration: str | float, key: str) -> float:
    """Return a duration in seconds; `key` is the setting's name in the error.

    >>> in_seconds("1.5h", "train.time_limit"), in_seconds(20, "train.time_limit")
    (5400.0, 20.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(duration).strip())
    if match is None or not float(match[1]):
        raise FusionZooError(f"--{key} {duration!r}: give a time above 0 such as 90s, 10m or 1.5h")
    return float(match[1]) * UNITS[match[2]]


def switches_as_words(cls: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `on`, `off` and `none` as the choice or value that they stand for.

    YAML reads the first two as booleans; `none` is None where no other choice has this word.
    """
    hints, words = hints_of(cls), dict(tree)
    for name, value in tree.items():
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        if is_dataclass(hints[name]):
            words[name] = switches_as_words(hints[name], value)
        elif value is False or value == NO:
            words[name] = next((word for word in (NO, "off") if word in choices), value)
            if value == NO and not choices and type(None) in get_args(hints[name]):
                words[name] = None
        elif value is True and "on" in choices:
            words[name] = "on"
    return words


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _walk(child, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _walk(child, key)
    else:
        yield key, value


def _takes_bool(hint: Any) -> bool:
    """Whether a type accepts booleans; the settings of components are checked by those."""
    if hint is bool or hint is Any or isinstance(hint, bool):
        return True
    return any(_takes_bool(part) for part in get_args(hint))
