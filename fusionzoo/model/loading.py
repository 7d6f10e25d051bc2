"""Load a model folder, also of the Hub: needs no original settings, runs no code of the folder."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError, explained, located
from fusionzoo.ground.plugins import imports_forbidden, load_plugins
from fusionzoo.structures import Batch, Sample
from fusionzoo.targets import Target

from .borrowed import read_borrowed, stored_part
from .card import edited_readme
from .confidence import Calibration
from .folder import (
    FolderConfig,
    check_digests,
    check_wrapped,
    read_config,
    why_not_built,
)
from .fusion_model import FusionModel, Raw, build_heads, create_model
from .hub import download, is_repository
from .standardise import Standardise
from .trained_models import find_trained, list_models
from .trained_on import TrainedOn

SPARE = 2**24  # elements that a build may allocate beyond four times the weights: tables, an image
TENSOR = 4096  # elements that the bookkeeping of a module and its tensor is worth
LARGE = 16 * TENSOR  # elements from which on a tensor that is freed is given back
ATEN = torch.ops.aten
GROWING = (  # what makes a tensor of a size that is not its input's, or another of its input's
    *(ATEN.clone, ATEN.repeat, ATEN.constant_pad_nd),
    *(ATEN.new_empty, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full),
)
# Factories that torch plans in Python, by modules that take 0.4 to 1.3 s of CPU to import: the size
# of what they make, by their arguments.
SIZES: dict[Any, Callable[..., Sequence[int]]] = {
    ATEN.randn: lambda size, *_: size,
    ATEN.hann_window: lambda length, *_: (length,),
    ATEN.linspace: lambda start, end, steps: (steps,),
}


@contextmanager
def bounded_allocation(weights: Path, beside: int = 0) -> Iterator[None]:
    """Refuse, in the block, to allocate much more than the tensors of a safetensors file hold.

    `beside` is the number of elements that are not in the file, of borrowed encoders.

    A setting in config.json that does not belong to the weights (a width, a number of layers) is
    thus refused before memory for it is taken. A tensor beyond the bound is made on the meta
    device, without memory: a classifier that an encoder builds and drops may be as large as it
    likes, and what the model keeps or computes with is refused.
    """
    from safetensors import safe_open

    with explained(f"{weights} cannot be read"), safe_open(str(weights), "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    budget = _Budget(4 * (beside + sum(math.prod(shape) for shape in shapes)) + SPARE)
    too_large = (
        f"{weights.parent / 'config.json'}: the settings ask for far larger tensors than"
        f" {weights.name} holds"
    )
    try:
        with budget:
            yield
    except Exception as error:
        if budget.is_exceeded():
            raise FusionZooError(too_large) from error
        raise
    if budget.is_exceeded():
        raise FusionZooError(too_large)


class _Budget(TorchDispatchMode):
    """Count the elements of new tensors that are in use, before they are allocated."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.left = elements
        self.large: list[tuple[StorageWeakRef, int]] = []
        self.withheld: list[StorageWeakRef] = []  # beyond the bound, or computed from such tensors
        self.refused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch would import its compiler: 1.3 s of CPU
        return False

    def is_exceeded(self) -> bool:
        """Return whether tensors beyond the bound are in use, or too many were asked for."""
        if self._in_use():
            gc.collect()  # what was dropped may refer to itself
        return self.refused or self._in_use()

    def _in_use(self) -> bool:
        self.withheld = [x for x in self.withheld if not x.expired()]
        return bool(self.withheld)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A first layer within the bound, before one beyond it, can still give huge features.
        planned = _planned(func, args, kwargs, every=self._in_use())
        size = 0 if planned is None else planned.numel() + TENSOR
        if size > self.left:
            self._give_back()
        fits = size <= self.left
        self.left -= size if fits else TENSOR
        if self.left < 0:
            self.refused = True
            raise FusionZooError("the settings ask for too many tensors")
        result: Any = func(*args, **kwargs) if fits else planned
        if fits and size >= LARGE:
            self.large.append((StorageWeakRef(result.untyped_storage()), size))
        if self.withheld or not fits:
            meta = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_meta]
            self.withheld += [StorageWeakRef(x.untyped_storage()) for x in meta]
        return result

    def _give_back(self) -> None:
        self.left += sum(size for storage, size in self.large if storage.expired())
        self.large = [x for x in self.large if not x[0].expired()]


def _planned(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, every: bool
) -> torch.Tensor | None:
    """Return, on the meta device, the tensor that an operation will allocate; else None.

    Operations that compute, not `GROWING` alone, are planned where `every` is set, but for those
    that return a view, or write into a tensor that is there.
    """
    factory = "device" in kwargs and not any(isinstance(x, torch.Tensor) for x in args)
    if factory and func.overloadpacket in SIZES:
        size = SIZES[func.overloadpacket](*args)
        planned = torch.empty(size, dtype=kwargs.get("dtype"), device="meta")
    elif factory:
        planned = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
    elif func.overloadpacket in GROWING or (
        every and not (func.is_view or func._schema.is_mutable)
    ):
        on_meta = tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
        try:
            planned = func(*on_meta, **{key: kwargs[key] for key in kwargs if key != "device"})
        except (NotImplementedError, RuntimeError):  # a value is asked for, or the call is wrong
            return None
    else:
        return None
    return planned if isinstance(planned, torch.Tensor) else None


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    plugins: str | Sequence[str] = (),
    encoders: Mapping[str, Encoder] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> FusionModel:
    """Load a model folder, the model of a run folder, one of `list_models()`, or `"owner/name"` of
    the Hugging Face Hub.

    A local folder needs no hub and no original settings; it comes first where both exist. Of a
    repository, `revision` is a branch, tag or commit, and `token` by default the one of `hf auth
    login`; what was downloaded before is read again without a network. A folder that was saved with
    `borrow` names the packages or hubs from which encoders are read first, whatever their size.

    `plugins` are files and modules to import first, of a model whose encoders or fusion are not
    fusionzoo's own; what the folder itself names is never imported. `encoders` are those that no
    folder can hold: modules of `wrap_encoder`, into which the weights are then read.
    """
    from safetensors.torch import load_model

    load_plugins(plugins)
    if is_repository(folder):
        folder = download(str(folder), revision, token)
    elif revision is not None:
        raise FusionZooError(
            f"revision={revision!r} is for models of the Hub; {folder} is a folder"
        )
    folder = Path(folder)
    if not folder.exists() and str(folder) in list_models():
        folder = find_trained(str(folder))
    folder = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    if not (folder / "config.json").is_file():
        here = folder.parts[0] if len(folder.parts) == 2 and Path(folder.parts[0]).is_dir() else ""
        asked = f"; the Hub is not asked, as there is a folder {here!r}" if here else ""
        what = "it holds no config.json" if folder.is_dir() else f"there is no such folder{asked}"
        what += "" if len(folder.parts) > 1 else f"; models of the zoo: {', '.join(list_models())}"
        raise FusionZooError(f"{folder} is no model folder: {what}")
    config, targets = read_config(folder)
    check_digests(folder, list(config.encoders))
    encoders = encoders or {}
    check_wrapped(config, encoders, folder)
    with imports_forbidden():
        borrowed = read_borrowed(config, folder, replaced=encoders)
    beside = sum(x.numel() for encoder in borrowed.values() for x in encoder.parameters())
    weights = folder / "model.safetensors"
    with bounded_allocation(weights, beside), imports_forbidden():
        model = _build(folder, config, targets, {**borrowed, **encoders})
    with explained(str(weights)):
        load_model(stored_part(model, config.borrowed), str(weights), strict=True)
    _check_finite(model, weights)
    calibration = Calibration.load(folder, model.answer_targets)
    model.complete(trained_on=TrainedOn.load(folder), calibration=calibration)
    model.readme = edited_readme(folder)
    model.to(device).eval()
    with bounded_allocation(weights, beside):
        _answer_blank(model, folder)
    return model


def _build(
    folder: Path,
    config: FolderConfig,
    targets: list[Target] | None,
    encoders: Mapping[str, Encoder],
) -> FusionModel:
    """Build what config.json describes, with weights yet to be loaded."""
    try:
        return _with_parts(
            config,
            create_model(
                config.fusion,
                {**{m: _without_sources(spec) for m, spec in config.encoders.items()}, **encoders},
                config.num_outputs,
                classes=config.classes,
                targets=targets,
                kinds=config.kinds,
                assets=folder,
            ),
        )
    except Exception as error:
        reason = why_not_built(config, error)
        raise FusionZooError(f"{folder / 'config.json'}: {reason}") from error


def _with_parts(config: FolderConfig, model: FusionModel) -> FusionModel:
    """Add what training measured or learnt beside encoders and fusion."""
    dims = {name: encoder.dim for name, encoder in model.named_encoders()}
    heads = None
    if config.unimodal_dim is not None:
        prior = torch.ones(config.num_outputs)
        heads = build_heads(model.fusion, dims, config.unimodal_dim, prior)
    return model.complete(
        prior=None if config.prior is None else torch.tensor(config.prior),
        standardise={name: Standardise(dims[name]) for name in config.standardise},
        align={name: nn.Linear(dims[name], width) for name, width in config.align.items()},
        matryoshka=config.matryoshka,
        heads=heads,
        first_weights=config.first_weights,
        sources=config.encoders,
    )


def _check_finite(model: FusionModel, weights: Path) -> None:
    """Raise an error that names a parameter with a value that is not finite, or a NaN in a buffer.

    A sum costs a tenth of the file's digest; infinite buffers, such as masks, are in order.
    """
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
            continue
        bad = ~tensor.isfinite() if name in parameters else tensor.isnan()
        if count := int(bad.sum()):  # else the sum overflows
            raise FusionZooError(
                f"{weights}: {name} has {count:,} of {tensor.numel():,} values that are not finite"
                " (NaN or infinity): train again, or copy the folder again"
            )


def _answer_blank(model: FusionModel, folder: Path) -> None:
    """Run one blank sample, so that settings with which the model cannot answer are found here."""
    problem = f"{folder / 'config.json'}: the model cannot answer"
    with explained(problem), located(problem):
        batch: Batch = model.collate()([Sample("", "", None, {})])
        batch = batch._replace(present=torch.ones_like(batch.present))
        if model.classes or model.targets:
            model.predict(batch)
        else:
            model.embed(batch)


def _without_sources(spec: Raw) -> dict[str, Any]:
    """Return an encoder's settings without the sources of its first weights.

    `checkpoint_path` and `cache_dir` are timm's.
    """
    sources = ("weights", "match", "prefix", "init", "checkpoint_path", "cache_dir")
    return {key: value for key, value in spec.items() if key not in sources}
