"""Build a configuration from YAML files and flags; help texts. Imports nothing heavy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusionzoo.errors import FusionZooError, did_you_mean, is_out_of_memory
from fusionzoo.files import write_text
from fusionzoo.ground.console import command_line, quiet_pipe
from fusionzoo.ground.plugins import plugin_list

from .flags import (
    NO,
    Tree,
    check_numbers,
    config_file,
    hints_of,
    is_component,
    named,
    parse_flags,
    read_yaml,
    switches_as_words,
    to_yaml,
)
from .schema import WORDS

if TYPE_CHECKING:
    from pydantic import TypeAdapter

C = TypeVar("C")
LESS_MEMORY = (
    "Where other programs hold a GPU's memory (`nvidia-smi` lists them), end them or choose another"
    " --device; a smaller batch needs less"
)


def from_args(cls: type[C], args: Sequence[str], words: Sequence[str] = ()) -> C:
    """Build a configuration of type `cls` from command-line flags and the files they name.

    Words without a flag are the settings `words` that have none. Without a model but with encoders
    or a fusion, which compose one, there is no word for it.
    """
    words = tuple(x for x in words if not any(f"{word}=".startswith(f"--{x}=") for word in args))
    flags = parse_flags(args, words)
    if words[:1] == ("model",) and {"encoders", "fusion"} & flags.keys():
        flags = parse_flags(args, words[1:])
    flags = _named(cls, flags)
    config = flags.pop("config", None)
    tree = {} if config is None else _named(cls, read_yaml(config_file(str(config))))
    if flags.get("resume"):
        tree = _resumed(flags, tree, config is not None)
    return _overlay(cls, tree, flags)


def _resumed(settings: Mapping[str, Any], tree: Mapping[str, Any], has_config: bool) -> Tree:
    """Return the settings of the run to continue: its config.yaml, unless another one is given."""
    if not (settings.get("out") or tree.get("out")):
        raise FusionZooError("--resume needs --out: the folder of the run to continue")
    if has_config:
        return dict(tree)
    path = Path(str(settings["out"])) / "config.yaml"
    if settings["resume"] == "auto" and not path.is_file():
        return {}
    stored = read_yaml(path)
    known = plugin_list(settings.get("plugins") or "")
    unasked = [x for x in plugin_list(stored.get("plugins") or "") if x not in known]
    if unasked:  # the folder may be a stranger's
        raise FusionZooError(
            f"{path}: the run was trained with --plugins {','.join(unasked)}, which is not imported"
            " unless it is given here too"
        )
    return stored


def _moved(settings: Tree, tree: Tree) -> Tree:
    """Return settings in which a path that is named as the data is where those of the run are."""
    data, before = dict(settings.get("data") or {}), tree.get("data") or {}
    name = data.pop("name", None)
    if not name or name == before.get("name") or not before.get("root"):
        return settings
    is_there = Path(name).expanduser().exists()
    return {**settings, "data": {"root": name, **data}} if is_there else settings


def from_settings(
    cls: type[C],
    settings: Mapping[str, Any],
    config: C | Mapping[str, Any] | str | PathLike[str] | None = None,
) -> C:
    """Build a configuration from settings by name, as `from_args` does from flags.

    The section may be omitted where the setting's name is unique: `epochs=3` is short for
    `train={"epochs": 3}`, that is `--train.epochs 3`. Settings override those of `config`: a
    configuration, a nested mapping, the path of a YAML file or a recipe's name.
    """
    if isinstance(config, cls):
        given = getattr(config, "given", {})  # a preset stands under these, not under the whole
        is_unchanged = given and from_tree(cls, given) == config
        tree: Mapping[str, Any] = given if is_unchanged else _as_tree(config)
    elif isinstance(config, Mapping):
        tree = config
    else:
        tree = {} if config is None else read_yaml(config_file(config))  # type: ignore[arg-type]
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
    top_level = {setting.name for setting in fields(cls)}
    dotted_keys = _leaves(cls)
    tree: Tree = {}
    for name, value in settings.items():
        known = name in top_level or any(name in words for words in WORDS.values())
        key = name if known else _dotted_key(name, dotted_keys)
        section, _, leaf = key.rpartition(".")
        tree = merge(tree, {section: {leaf: value}} if section else {leaf: value})
    return tree


def _dotted_key(name: str, dotted_keys: Mapping[str, bool]) -> str:
    """Return the full dotted key of a setting from its last part."""
    keys = [key for key in dotted_keys if key.rpartition(".")[2] == name]
    if len(keys) == 1:
        return keys[0]
    if keys:
        sections = " or ".join(f"{key.partition('.')[0]}={{{name!r}: ...}}" for key in keys)
        raise FusionZooError(f"{name}: several settings have this name; give {sections}")
    return name  # unknown: `_refuse_unknown` raises and suggests the nearest name


def _with_words(cls: type, tree: Mapping[str, Any]) -> Tree:
    """Put settings that need no section into it: `decimal` is `data.decimal`."""
    out, dotted_keys = dict(tree), _leaves(cls)
    for section in WORDS.keys() & dotted_keys.keys():
        words = {name: out.pop(name) for name in WORDS[section] if name in out}
        for name in words:
            others = [key.partition(".")[0] for key in dotted_keys if key.endswith(f".{name}")]
            if others:
                raise FusionZooError(
                    f"{name} is a setting of {section} and of {others[0]}: put it into one of these"
                )
        component = out.get(section, {})
        component = {"name": component} if isinstance(component, str) else component
        if words and isinstance(component, Mapping):
            for name, value in words.items():
                if name in component and component[name] != value:
                    raise FusionZooError(
                        f"--{name} {value} and --{section}.{name} {component[name]} differ: leave"
                        " one out"
                    )
            out[section] = {**component, **words}
    return out


def _overlay(cls: type[C], tree: Mapping[str, Any], settings: Mapping[str, Any]) -> C:
    tree, settings = (_named(cls, _with_words(cls, x)) for x in (tree, settings))
    if settings.get("resume"):
        settings = _moved(settings, tree)
    hints = hints_of(cls)  # type: ignore[arg-type]
    sections = [setting.name for setting in fields(cls) if is_dataclass(hints[setting.name])]  # type: ignore[arg-type]
    return from_tree(cls, merge(tree, settings, sections))


def from_tree(cls: type[C], tree: Mapping[str, Any]) -> C:
    """Validate a nested mapping and build `cls` from it; errors are one line."""
    from pydantic import ValidationError

    dotted_keys = _leaves(cls)
    tree = _named(cls, tree)
    _refuse_unknown(tree, dotted_keys, "")
    tree = switches_as_words(cls, tree)
    check_numbers(cls, tree)
    components = {key: value for key, value in asdict(cls()).items() if dotted_keys.get(key)}  # type: ignore[call-overload]
    if components.get("data") and (tree.get("data") or {}).get("root"):
        components["data"] = {}  # no default name: that of the file or folder follows from it
    try:
        config: C = _adapter(cls).validate_python(  # type: ignore[arg-type]
            merge(components, tree)
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise FusionZooError(f"--{key} {first['input']!r}: {reason}") from None
    check_numbers(cls, asdict(config))  # type: ignore[call-overload]  # the word `infinity`
    if getattr(config, "preset", NO) != NO:
        config = replace(config, given=dict(tree))  # type: ignore[type-var]
    return config


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    """Return what validates a configuration; building it takes longer than to answer a row."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _as_tree(config: Any) -> Tree:
    """Return a configuration as a nested mapping."""
    tree = asdict(config)
    return {x.name: tree[x.name] for x in fields(config) if not x.metadata.get("hidden")}


def write_yaml(config: Any, path: Path) -> None:
    """Write a complete, resolved configuration."""
    write_text(path, to_yaml(json.loads(json.dumps(_as_tree(config)))))


def merge(
    base: Mapping[str, Any], override: Mapping[str, Any], sections: Sequence[str] = ()
) -> Tree:
    """Merge `override` over `base`; a component with another name drops the old one's settings.

    `sections` are not components: another optimiser name drops only `optim.settings`.
    """
    out = {} if _renamed(base, override) else dict(base)
    for key, value in override.items():
        inherited = out.get(key)
        if isinstance(inherited, Mapping) and isinstance(value, Mapping):
            if key in sections and _renamed(inherited, value):
                inherited = {k: x for k, x in inherited.items() if k not in ("name", "settings")}
            value = merge(inherited, value)
        out[key] = value
    return out


def _renamed(base: Mapping[str, Any], override: Mapping[str, Any]) -> bool:
    return "name" in override and "name" in base and override["name"] != base["name"]


def split_name(component: Mapping[str, Any], key: str) -> tuple[str, Tree]:
    """Split `{"name": n, **settings}`; a missing name is an error that names `key`."""
    settings = dict(component)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise FusionZooError(f"{key} has no name: give --{key}.name")
    return name, settings


def _leaves(cls: Any, prefix: str = "") -> dict[str, bool]:
    """Map each dotted key to whether its value is a mapping with keys that `cls` does not fix."""
    leaves: dict[str, bool] = {}
    hints = hints_of(cls)
    for setting in fields(cls):
        key, hint = prefix + setting.name, hints[setting.name]
        if setting.metadata.get("hidden"):
            continue
        if is_dataclass(hint):
            leaves |= _leaves(hint, f"{key}.")
        else:
            leaves[key] = getattr(hint, "__origin__", None) is dict
    return leaves


def _refuse_unknown(tree: Mapping[str, Any], dotted_keys: Mapping[str, bool], prefix: str) -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in dotted_keys:
            if dotted_keys[key] and not isinstance(value, Mapping):
                raise FusionZooError(f"--{key} holds settings: give --{key}.<setting> {value}")
            continue
        if not any(leaf.startswith(f"{key}.") for leaf in dotted_keys):
            raise FusionZooError(
                f"unknown setting --{key}.{_nearest_flag(key, dotted_keys)}"
                " --help lists all of them."
            )
        if not isinstance(value, Mapping):
            raise FusionZooError(f"--{key} is a group of settings: give --{key}.<setting> {value}")
        _refuse_unknown(value, dotted_keys, f"{key}.")


def _nearest_flag(key: str, dotted_keys: Mapping[str, bool]) -> str:
    """Suggest the flag with the nearest last part, else the nearest whole flag."""
    sections = {leaf.rpartition(".")[0] for leaf in dotted_keys} - {""}
    flags = [*dotted_keys, *sorted(sections)]
    if "." not in key:
        words = [
            f"{section}.{x}" for section in WORDS if section in dotted_keys for x in WORDS[section]
        ]
        leaves = {flag.rpartition(".")[2]: flag for flag in reversed([*flags, *words])}
        nearest = get_close_matches(key, leaves, n=1, cutoff=0.5)
        if nearest:
            return f" Did you mean {'--' + leaves[nearest[0]]!r}?"
    return did_you_mean(f"--{key}", [f"--{flag}" for flag in flags])


def _named(cls: Any, tree: Mapping[str, Any]) -> Tree:
    """Expand components written as a string to mappings, in the fields of `cls` that hold one."""
    plain = {
        setting.name
        for setting in fields(cls)
        if is_component([setting.name])
        and (
            setting.default_factory is MISSING
            or "name" not in (setting.default_factory() or {"name": ""})
        )
    }
    return {**named(tree), **{key: tree[key] for key in plain & tree.keys()}}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What `--help` of a command shows first."""

    name: str
    purpose: str
    words: tuple[str, ...]  # settings that need no flag, in this order
    examples: tuple[str, ...]  # what stands behind the command's name
    common: tuple[str, ...]  # settings that most people need
    more: str = ""  # behind the purpose in `--help-all`
    show_details: Callable[[], None] = lambda: None  # prints settings of components, below these

    def short(self, cls: type) -> str:
        """Return the examples and the common settings."""
        command = command_line(self.name)
        lines = dict(_lines(cls))
        usage = " ".join(["usage:", command, *(word.upper() for word in self.words), "[--SETTING]"])
        return "\n".join(
            [
                f"{self.purpose}\n\n{usage}\n",
                *(f"  {command} {example}" for example in self.examples),
                "",
                *(lines[key] for key in self.common),
                f"\n{command} --help-all shows all {len(lines)} settings",
            ]
        )

    def whole(self, cls: type) -> str:
        """Return every setting, by section."""
        return f"{self.purpose}\n{self.more}\n\n{help_text(cls)}"


def help_text(cls: type) -> str:
    """Return a line per setting, by section: flag, default, meaning."""
    sections: dict[str, list[str]] = {}
    for key, line in _lines(cls):
        sections.setdefault(key.rpartition(".")[0], []).append(line)
    parts = [
        "\n".join([f"{section or 'settings'}:", *lines]) for section, lines in sections.items()
    ]
    return "\n\n".join(parts)


def _lines(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the line of each setting."""
    hints = hints_of(cls)
    for setting in fields(cls):
        if setting.metadata.get("hidden"):
            continue
        if is_dataclass(hints[setting.name]):
            yield from _lines(hints[setting.name], f"{prefix}{setting.name}.")
        else:
            flag = f"--{prefix}{setting.name}"
            meaning = setting.metadata.get("help", "")
            line = f"  {flag:<28} {_default(setting)!s:<34} {meaning}".rstrip()
            yield f"{prefix}{setting.name}", line


def _default(setting: Field[Any]) -> Any:
    if setting.default_factory is not MISSING:
        return json.dumps(setting.default_factory())
    return NO if setting.default is None else setting.default


@quiet_pipe
def run_command(
    cls: type[C],
    usage: Usage | str,
    args: Sequence[str],
    start: Callable[[C], int],
    *,
    words: Sequence[str] = (),
    interrupted: str = "stopped",
) -> int:
    """Build the configuration from `args` and call `start` with it; return the exit code.

    `--help` prints the usage; where that is text alone, with all settings. A user's error is
    printed on one line, exit code 2, as is lack of memory; a Ctrl-C that `start` does not handle
    prints `interrupted`, exit code 130.
    """
    if {"-h", "--help", "--help-all"} & set(args):
        if isinstance(usage, str):
            print(f"{usage.strip()}\n\n{help_text(cls)}")
        elif "--help-all" in args:
            print(usage.whole(cls))
            usage.show_details()
        else:
            print(usage.short(cls))
        print("\nSettings of a fusion, encoder or training strategy: fusionzoo zoo info NAME")
        print("Settings of a data set: fusionzoo data list NAME; of a table, NAME is manifest")
        return 0
    words = words if isinstance(usage, str) else usage.words
    try:
        return start(from_args(cls, args, words))
    except BrokenPipeError:
        raise  # `quiet_pipe` handles it
    except (FusionZooError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # "CUDA out of memory. Tried to allocate 2 MiB. GPU 0 has .. of which 1 MiB is free. .."
        cause = ". ".join(str(error).partition("\n")[0].split(". ")[:3])
        print(f"error: {cause}. {LESS_MEMORY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
