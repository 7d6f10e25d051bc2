"""Read the tensors of a checkpoint file, also of a state dict nested in it; no code is executed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, one_line

# Keys of state dicts in a checkpoint; of several in one file, the first of these is read.
CONTAINERS = ("state_dict", "model_state_dict", "model", "weights", "net", "network", "module")
OPTIMIZER = {"state", "param_groups"}  # keys of an optimiser's state
MOST_NESTED = 4  # levels


class StoredTensors(NamedTuple):
    """Tensors of a file, where in it they are (`['net']`), and what a prefix says beyond that."""

    tensors: dict[str, Tensor]
    place: str
    prefix: str


def read_weights(path: Path, prefix: str = "") -> StoredTensors:
    """Read a file's state dict, or the one nested under a key such as `net` or `state_dict`.

    Of several nested ones, the first of `CONTAINERS` is read, unless `prefix` begins with the key
    of another one: `ema.`.
    """
    contents, place = _load(path), ""
    for _ in range(MOST_NESTED):
        if not isinstance(contents, Mapping):
            break
        nested = {str(key): x for key, x in contents.items() if _holds_tensors(x, MOST_NESTED)}
        if not nested or (_is_state_dict(contents) and not nested.keys() & {*CONTAINERS}):
            break
        default = next((key for key in CONTAINERS if key in nested), "")
        default = default or (next(iter(nested)) if len(nested) == 1 else "")
        named = next((key for key in nested if prefix.startswith(f"{key}.") and key != default), "")
        if not named and not default:
            raise FusionZooError(
                f"{path}{place} holds several state dicts, {', '.join(map(repr, nested))}:"
                f" prefix={next(iter(nested)) + '.'!r} reads the first"
            )
        prefix = prefix.removeprefix(f"{named}.") if named else prefix
        contents, place = nested[named or default], f"{place}[{named or default!r}]"
    if not isinstance(contents, Mapping):
        raise FusionZooError(f"{path} holds a {type(contents).__name__}, not a state dict")
    tensors = {str(key): x for key, x in contents.items() if isinstance(x, Tensor)}
    if not tensors:
        raise FusionZooError(f"{path} holds no tensors")
    return StoredTensors(tensors, place, prefix)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FusionZooError(f"no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FusionZooError(f"{path} cannot be read as weights: {one_line(error)}") from error


def _is_state_dict(contents: Mapping[Any, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.ndim for x in contents.values())


def _holds_tensors(contents: Any, depth: int) -> bool:
    """Return whether this is a state dict, or holds one; an optimiser's state is none."""
    if depth < 1 or not isinstance(contents, Mapping) or contents.keys() >= OPTIMIZER:
        return False
    return _is_state_dict(contents) or any(_holds_tensors(x, depth - 1) for x in contents.values())
