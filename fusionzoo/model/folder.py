"""A model folder: its config.json, checked before anything is built, and its files' digests."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Len

from fusionzoo.datasets.tables.table import refuse_name
from fusionzoo.encoders import WRAPPED, Encoder
from fusionzoo.errors import FusionZooError, check_known, explained, first_problem, one_line
from fusionzoo.files import sha256_of, strict_json, without_folders, write_json
from fusionzoo.fusion import Fusion
from fusionzoo.ground.plugins import missing_plugins, source_of
from fusionzoo.ground.version import __version__
from fusionzoo.structures import KINDS
from fusionzoo.targets import Target, from_spec

# Of the model folder. Each format that was released is read for ever: a new number comes with code
# that turns the old config.json into the new one, and tests/fixtures/ keeps a folder of each.
FORMAT = 2
# Settings of fusions that format 1 did not have, with what these fusions were before.
_OF_FORMAT_1: dict[str, dict[str, Any]] = {
    **{name: {"project": True} for name in ("dbf", "ecml", "pdf", "qmf", "tmc")},
    "mmdynamics": {"join": True, "detach": True},
}
MAX_BYTES = 1 << 26  # of config.json
Count = Annotated[int, Ge(1)]
_log = logging.getLogger("fusionzoo")
NAME = "digests.json"
ALGORITHM = "sha256"
REQUIRED = ("config.json", "model.safetensors")  # files of every model folder
OPTIONAL = ("trained_on.safetensors", "calibration.json")


@dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """The keys of config.json and their types; others are an error."""

    num_outputs: Count
    classes: list[str]
    fusion: dict[str, Any]
    encoders: Annotated[dict[str, dict[str, Any]], Len(1)]
    kinds: dict[str, str]
    targets: list[dict[str, Any]] | None = None
    standardise: list[str] = field(default_factory=list)  # modalities whose features are
    align: dict[str, Count] = field(default_factory=dict)
    matryoshka: list[Count] = field(default_factory=list)  # trained prefixes of the fused vector
    prior: list[float] | None = None  # exp(logits) of a sample without any modality
    unimodal_dim: Count | None = None  # of the modalities' own heads, if stored
    # modality -> `source` and `licence` of the encoder's first weights; empty: trained from scratch
    first_weights: dict[str, dict[str, str]] = field(default_factory=dict)
    borrowed: dict[str, str] = field(default_factory=dict)  # modality -> digest, see borrowed.py
    plugins: list[str] = field(default_factory=list)  # shown to people, never imported
    format: int = FORMAT
    fusionzoo: str = ""  # the versions that saved the folder
    torch: str = ""


def read_config(folder: Path) -> tuple[FolderConfig, list[Target] | None]:
    """Read and check config.json; return it and what the model answers, if not one class."""
    path = folder / "config.json"
    with explained(f"{path} cannot be read as JSON", OSError, ValueError, RecursionError):
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,}")
        config = strict_json(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise FusionZooError(f"{path} must hold a JSON object, found {type(config).__name__}")
    number = config.get("format")
    if isinstance(number, int) and number > FORMAT:
        writer = f" ({config['fusionzoo']!r:.40})" if "fusionzoo" in config else ""
        raise FusionZooError(
            f"{folder}: format {number} is that of a newer fusionzoo{writer}; {__version__} reads"
            f" formats up to {FORMAT}: pip install --upgrade fusionzoo"
        )
    if number not in range(1, FORMAT + 1) or isinstance(number, bool):
        raise FusionZooError(f"{folder}: format {number!r} is not one; formats are 1 to {FORMAT}")
    checked = _of_type(config, path)
    if number == 1:
        checked = replace(checked, fusion=_from_format_1(checked.fusion))
    try:
        targets = None if checked.targets is None else [from_spec(x) for x in checked.targets]
    except FusionZooError as error:
        raise FusionZooError(f"{path}: targets: {why_not_built(checked, error)}") from None
    _check_names(checked, path)
    _check_sizes(checked, targets, path)
    return checked, targets


def _of_type(config: Mapping[str, Any], path: Path) -> FolderConfig:
    from pydantic import TypeAdapter, ValidationError

    for key in config:
        known = FolderConfig.__dataclass_fields__
        check_known(key, known, f"{path}: unknown key {key!r}", "This version of fusionzoo knows")
    try:
        return TypeAdapter(FolderConfig).validate_json(json.dumps(config), strict=True)
    except ValidationError as error:
        raise FusionZooError(f"{path}: {first_problem(error)}") from None


def _from_format_1(fusion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a fusion, and of those within it, as format 2 writes them."""
    name = fusion.get("name")
    before = _OF_FORMAT_1.get(name, {}) if isinstance(name, str) else {}
    settings = {**before, **fusion}
    members = settings.get("members")
    if isinstance(members, list):
        settings["members"] = [_from_format_1(x) if isinstance(x, dict) else x for x in members]
    return settings


def _check_names(config: FolderConfig, path: Path) -> None:
    """Check modalities, whose names are those of folders here, and their kinds."""
    for name in config.encoders:
        reason = refuse_name(name)
        if reason is not None:
            raise FusionZooError(f"{path}: encoders: {name!r} is no name of a modality: {reason}")
    for name, kind in config.kinds.items():
        if kind not in KINDS:
            raise FusionZooError(f"{path}: kinds.{name} is {kind!r}, none of {', '.join(KINDS)}")


def _check_sizes(config: FolderConfig, targets: Sequence[Target] | None, path: Path) -> None:
    """Compare what the entries say of each other."""
    by_key: dict[str, Iterable[str]] = {
        "kinds": config.kinds,
        "align": config.align,
        "standardise": config.standardise,
        "first_weights": config.first_weights,
        "borrowed": config.borrowed,
    }
    for key, modalities in by_key.items():
        unknown = sorted({*modalities} - config.encoders.keys())
        if unknown:
            raise FusionZooError(f"{path}: {key} names {unknown[0]!r}, which has no encoder")
    count, prior = config.num_outputs, config.prior
    if prior is not None and (len(prior) != count or not all(0 <= x < math.inf for x in prior)):
        raise FusionZooError(f"{path}: prior must be {count} finite numbers of at least 0")
    if targets is not None:
        outputs = max(1, sum(target.width for target in targets))
    elif config.classes:
        outputs = len(set(config.classes))
    else:
        return  # built with a number of outputs only: it embeds
    if outputs != count:
        what = "classes" if targets is None else "targets"
        raise FusionZooError(f"{path}: num_outputs is {count}, and the {what} make {outputs}")


def public_spec(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with paths in the encoders' settings cut to their last part.

    Nothing is read from these paths when a folder is loaded.
    """
    encoders = {
        modality: {
            key: without_folders(value) if isinstance(value, str) else value
            for key, value in spec.items()
        }
        for modality, spec in config["encoders"].items()
    }
    return {**config, "encoders": encoders}


def sources(model: torch.nn.Module) -> list[str]:
    """Return the plugins whose encoders, fusion and targets a model holds: `["my_module.py"]`."""
    parts = [x for x in model.modules() if isinstance(x, Encoder | Fusion)]
    # FSDP puts a class of torch's before a module's own.
    classes = [
        next(c for c in type(x).__mro__ if c.__module__.partition(".")[0] != "torch") for x in parts
    ]
    classes += [type(target) for target in getattr(model, "targets", None) or ()]
    return sorted({source for source in map(source_of, classes) if source is not None})


def why_not_built(config: FolderConfig, error: Exception) -> str:
    """Word an error of building a model: where plugins are not imported, say which."""
    missing = missing_plugins(config.plugins)
    if not missing:
        return one_line(error)
    return f"{one_line(error).partition('. ')[0]}. {how_to_import(missing)}"


def how_to_import(missing: Sequence[str]) -> str:
    """Say how the plugins that define a model's components are imported."""
    if missing == ["__main__"]:
        return (
            "A notebook or script defined a component of the model: define and register it here,"
            " then load again"
        )
    return (
        f"The model has components of {' and '.join(missing)}, not imported here:"
        f" fusionzoo.load(..., plugins={missing!r}), on the command line --plugins"
        f" {','.join(missing)}"
    )


def check_wrapped(config: FolderConfig, encoders: Mapping[str, Encoder], folder: Path) -> None:
    """Compare the encoders that `load` was given with those that the folder cannot rebuild."""
    for name, encoder in encoders.items():
        check_known(name, config.encoders, f"{folder}: the model has no modality {name!r}")
        if not isinstance(encoder, Encoder):
            raise FusionZooError(
                f"encoders[{name!r}] is of type {type(encoder).__name__}: fusionzoo.wrap_encoder"
                " makes an encoder of a module"
            )
    for name, spec in config.encoders.items():
        if spec.get("name") == WRAPPED and name not in encoders:
            raise FusionZooError(
                f"{folder}: the encoder of {name!r} wraps a module, of which the folder holds the"
                f" weights alone: fusionzoo.load(folder, encoders={{{name!r}:"
                " fusionzoo.wrap_encoder(...)})"
            )


def write_digests(folder: Path, files: list[Path]) -> None:
    """Write the digests of a folder's `files`."""
    digests = {path.relative_to(folder).as_posix(): sha256_of(path) for path in sorted(files)}
    write_json(folder / NAME, {"algorithm": ALGORITHM, "files": digests})


def check_digests(folder: Path, modalities: list[str]) -> None:
    """Raise an error that names a file which was changed, removed or added since it was saved.

    Files may be added at the top, such as a README, but not in the folders of `modalities`, whose
    files encoders read. A folder of an earlier version has no digests, which is logged.
    """
    path = folder / NAME
    if not path.is_file():
        _log.warning(
            "%s has no %s (saved by an earlier version): whether its files were changed is not"
            " checked",
            *(folder, NAME),
        )
        return
    digests = _read(path)
    for name in REQUIRED:
        if name not in digests:
            raise FusionZooError(
                f"{path} has no digest of {name}: copy the folder again, or remove {path} if you"
                " changed it yourself"
            )
    check_listed(folder, digests)
    for file in _files_below(folder, modalities):
        if file.relative_to(folder).as_posix() not in digests:
            raise FusionZooError(
                f"{file} was added since the model was saved: remove it, or remove {path} if you"
                " added it yourself"
            )


def check_listed(folder: Path, digests: Mapping[str, str] | None = None) -> None:
    """Raise an error that names a file of a folder's `digests.json` that was changed or removed."""
    path = folder / NAME
    for name, digest in (_read(path) if digests is None else digests).items():
        file = folder / name
        if not file.is_file():
            raise FusionZooError(f"{file} is missing: {path} lists it; copy the whole folder again")
        if sha256_of(file) != digest:
            raise FusionZooError(
                f"{file} was changed since the model was saved: copy the folder again, or remove"
                f" {path} if you changed it yourself"
            )


def _files_below(folder: Path, modalities: list[str]) -> list[Path]:
    return [
        path
        for name in modalities
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def files_of_model(folder: Path, modalities: list[str]) -> list[Path]:
    """Return the files of a model folder of which digests are written."""
    optional = [path for path in (folder / name for name in OPTIONAL) if path.is_file()]
    return [*(folder / name for name in REQUIRED), *optional, *_files_below(folder, modalities)]


def listed_files(folder: Path) -> list[str]:
    """Return the names of the files that a folder's digests list."""
    return list(_read(folder / NAME))


def _read(path: Path) -> dict[str, str]:
    """Read the digests; each name must lead to a file below the folder."""
    damages = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with explained(f"{path} cannot be read", *damages):
        contents: Any = json.loads(path.read_text(encoding="utf-8"))
        files = contents["files"]
        if contents["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm {contents['algorithm']!r}; {ALGORITHM} is known")
        if not all(isinstance(digest, str) and _is_below(name) for name, digest in files.items()):
            raise ValueError("it must map the names of files in the folder to digests")
        return dict(files)


def _is_below(name: str) -> bool:
    """Return whether a name leads down from a folder.

    >>> _is_below("text/tokenizer.json"), _is_below("../secret"), _is_below("/etc/passwd")
    (True, False, False)
    """
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts
