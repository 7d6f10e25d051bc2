"""Why a step was not finite: which samples, which modality, which layer first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusionzoo.model import quiet
from fusionzoo.structures import Batch

from .objective import Objective


@torch.no_grad()
def first_cause(objective: Objective, batches: Sequence[Batch]) -> str | None:
    """Say what is not finite in these batches; None where it is another process's trouble.

    Looks at the inputs, then at every layer's output in evaluation mode, in the order in which they
    run, then at the gradients that are still there.
    """
    gradients = [n for n, p in objective.named_parameters() if _bad(p.grad)]
    # Every batch is run, for processes that share weights must run the same.
    with quiet(objective):
        found = [(_bad_layer(objective, batch), _bad_input(batch)) for batch in batches]
    for layer, given in found:
        if given or layer:
            return given or layer
    ids = ", ".join(repr(name) for batch in batches for name in batch.ids[:4])
    if not gradients:
        return None
    return f"samples {ids}, ...: the loss is finite, the gradient of {_name(gradients[-1])} is not"


def _bad_input(batch: Batch) -> str | None:
    for column, (modality, given) in enumerate(batch.inputs.items()):
        for values in given.values():
            if values.is_floating_point():
                finite = values.flatten(1).isfinite().all(1) | ~batch.present[:, column]
                rows = (~finite).nonzero()[:, 0].tolist()
                if rows:
                    return f"{_ids(batch, rows)}: the input of {modality} is not finite"
    return None


def _bad_layer(objective: Objective, batch: Batch) -> str | None:
    """Run the batch; the first layer that makes something not finite, and of which samples."""
    found: list[str] = []
    names = {module: name for name, module in objective.named_modules() if name}

    def look(module: nn.Module, given: Any, made: Any) -> None:
        if not found and any(_bad(one) for one in tree_leaves(made)):
            found.append(names[module])

    hooks = [m.register_forward_hook(look) for m in names if not list(m.children())]
    try:
        step = objective(batch)
    finally:
        for hook in hooks:
            hook.remove()
    rows = (~step.loss.isfinite()).nonzero()[:, 0].tolist()
    if not rows and not found:
        return None
    where = f"first in {_name(found[0])}" if found else "in the loss"
    return f"{_ids(batch, rows or range(len(batch.ids)))}: not finite, {where}"


def _bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not _finite(value)


def _finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _ids(batch: Batch, rows: Sequence[int]) -> str:
    some = ", ".join(repr(batch.ids[row]) for row in rows[:5])
    return f"samples {some}{', ...' if len(rows) > 5 else ''}"


def _name(layer: str) -> str:
    """`model.encoders.image.net.conv1` -> `image: net.conv1`."""
    name = layer.removeprefix("model.")
    if name.startswith("encoders."):
        _, modality, inside = name.split(".", 2)
        return f"{modality}: {inside}"
    return name
