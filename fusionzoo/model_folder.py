"""Check a model folder before anything is built from it: config.json, and the weights' sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Len
from torch.utils._python_dispatch import TorchDispatchMode

from .encoders import WRAPPED, Encoder
from .errors import FusionZooError, did_you_mean, one_line
from .fusion import Fusion
from .plugins import missing_plugins
from .sources import source_of
from .targets import Target, from_spec

FORMAT = 1  # of the model folder
Count = Annotated[int, Ge(1)]
SPARE = 2**24  # elements that a build may allocate beyond four times the weights: tables, a picture
TENSOR = 4096  # elements that the bookkeeping of a module and its tensor is worth
ATEN = torch.ops.aten
GROWING = (  # what makes a tensor of a size that is not its input's, or another of its input's
    *(ATEN.clone, ATEN.repeat, ATEN.constant_pad_nd),
    *(ATEN.new_empty, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full),
)


@dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """What config.json must hold; what else stands there is for people to read."""

    num_outputs: Count
    classes: list[str]
    fusion: dict[str, Any]
    encoders: Annotated[dict[str, dict[str, Any]], Len(1)]
    kinds: dict[str, str]
    targets: list[dict[str, Any]] | None = None
    standardise: list[str] = field(default_factory=list)  # modalities whose features are
    align: dict[str, Count] = field(default_factory=dict)
    unimodal_dim: Count | None = None  # of the modalities' own heads, if stored
    plugins: list[str] = field(default_factory=list)  # shown to people, never imported


def read_config(folder: Path) -> tuple[FolderConfig, list[Target] | None]:
    """Read and check config.json; return it and what the model answers, if not one class."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FusionZooError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise FusionZooError(f"{path} must hold a JSON object, found {type(config).__name__}")
    if config.get("format") != FORMAT:
        raise FusionZooError(
            f"{folder}: format {config.get('format')!r}; this version reads {FORMAT}"
        )
    checked = _of_type(config, path)
    try:
        targets = None if checked.targets is None else [from_spec(one) for one in checked.targets]
    except FusionZooError as error:
        raise FusionZooError(f"{path}: targets: {error}") from None
    _check_sizes(checked, targets, path)
    return checked, targets


def _of_type(config: Mapping[str, Any], path: Path) -> FolderConfig:
    from pydantic import TypeAdapter, ValidationError

    known = FolderConfig.__dataclass_fields__
    try:
        relevant = json.dumps({key: value for key, value in config.items() if key in known})
        return TypeAdapter(FolderConfig).validate_json(relevant, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise FusionZooError(
            f"{path}: {key}: {first['msg'][0].lower()}{first['msg'][1:]}"
        ) from None


def _check_sizes(config: FolderConfig, targets: Sequence[Target] | None, path: Path) -> None:
    """Compare what the entries say of each other."""
    by_key: dict[str, Iterable[str]] = {
        "kinds": config.kinds,
        "align": config.align,
        "standardise": config.standardise,
    }
    for key, modalities in by_key.items():
        unknown = sorted({*modalities} - config.encoders.keys())
        if unknown:
            raise FusionZooError(f"{path}: {key} names {unknown[0]!r}, which has no encoder")
    if targets is not None:
        outputs = max(1, sum(one.width for one in targets))
    elif config.classes:
        outputs = len(set(config.classes))
    else:
        return  # built with a number of outputs only: it embeds
    if outputs != config.num_outputs:
        what = "classes" if targets is None else "targets"
        raise FusionZooError(
            f"{path}: num_outputs is {config.num_outputs}, and the {what} make {outputs}"
        )


def sources(model: torch.nn.Module) -> list[str]:
    """Return the plugins whose encoders and fusions a model holds: `["my_module.py"]`."""
    parts = [x for x in model.modules() if isinstance(x, Encoder | Fusion)]
    # FSDP puts a class of torch's before a module's own.
    classes = [next(c for c in type(x).__mro__ if not _is_torch(c)) for x in parts]
    return sorted({source for source in map(source_of, classes) if source is not None})


def _is_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def why_not_built(config: FolderConfig, error: Exception) -> str:
    """Word an error of building a model: where plugins are not imported, say which."""
    missing = missing_plugins(config.plugins)
    if not missing:
        return one_line(error)
    first = one_line(error).partition(". ")[0]
    if missing == ["__main__"]:
        return (
            f"{first}. A notebook or script defined a component of the model: define and register"
            " it here, then load again"
        )
    return (
        f"{first}. The model has components of {' and '.join(missing)}, not imported here:"
        f" fusionzoo.load(..., plugins={missing!r}), on the command line --plugins"
        f" {','.join(missing)}"
    )


def check_wrapped(config: FolderConfig, encoders: Mapping[str, Encoder], folder: Path) -> None:
    """Compare the encoders that `load` was given with those that the folder cannot rebuild."""
    for name, encoder in encoders.items():
        if name not in config.encoders:
            raise FusionZooError(
                f"{folder}: the model has no modality {name!r}."
                f"{did_you_mean(name, config.encoders)} It has: {', '.join(config.encoders)}."
            )
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


@contextmanager
def bounded_allocation(weights: Path) -> Iterator[None]:
    """Refuse, in the block, to allocate much more than the tensors of a safetensors file hold.

    A setting in config.json that does not belong to the weights (a width, a number of layers) is
    thus refused before memory for it is taken. Building on the meta device would do the same, but
    the libraries' constructors compute with what they build.
    """
    from safetensors import safe_open

    try:
        with safe_open(str(weights), "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except Exception as error:
        raise FusionZooError(f"{weights} cannot be read: {one_line(error)}") from None
    with _Budget(4 * sum(math.prod(shape) for shape in shapes) + SPARE, weights):
        yield


class _Budget(TorchDispatchMode):
    """Count the elements of new tensors, before they are allocated."""

    def __init__(self, elements: int, weights: Path) -> None:
        super().__init__()
        self.left, self.weights = elements, weights

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.left -= _new_elements(func, args, kwargs)
        if self.left < 0:
            raise FusionZooError(
                f"the settings ask for far larger tensors than {self.weights.name} holds"
            )
        return func(*args, **kwargs)


def _new_elements(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return how many elements an operation that makes a tensor will allocate, else 0."""
    from torch.utils._pytree import tree_map_only

    factory = "device" in kwargs and not any(isinstance(x, torch.Tensor) for x in args)
    if factory:
        planned = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
    elif func.overloadpacket in GROWING:
        on_meta = tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
        planned = func(*on_meta, **{key: kwargs[key] for key in kwargs if key != "device"})
    else:
        return 0
    return planned.numel() + TENSOR if isinstance(planned, torch.Tensor) else 0
