"""Steps whose loss or gradient is not finite: undo their traces, and say why they were not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusionzoo.distributed.process_group import World, gather
from fusionzoo.eval_mode import quiet
from fusionzoo.structures import Batch, Features

from .objective import Objective


class SavedBuffers:
    """A copy of all floating-point buffers (running statistics), to restore after a bad step."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.copies = [b.clone() for b in self.buffers]

    def save(self) -> None:
        """Copy the buffers as they are now."""
        if self.buffers:
            torch._foreach_copy_(self.copies, self.buffers)

    def restore(self) -> None:
        """Put the buffers back to what `save` copied."""
        torch._foreach_copy_(self.buffers, self.copies)


def why_not_finite(objective: Objective, batches: Sequence[Batch], world: World) -> str:
    """Explain loss or gradients that are not finite; the same text on every process."""
    moved = [batch.to(world.device) for batch in batches]
    causes = gather(first_cause(objective, moved), world)
    named_causes = [
        f"process {i}: {x}" if len(causes) > 1 else x for i, x in enumerate(causes) if x
    ]
    return "; ".join(named_causes) or "the gradients overflow, and no sample or layer by itself"


@torch.no_grad()
def first_cause(objective: Objective, batches: Sequence[Batch]) -> str | None:
    """Name what is not finite in these batches; None where the cause is on another process.

    Looks at the inputs, then at every layer's output in evaluation mode, in the order in which they
    run, then at the gradients that are still there.
    """
    gradients = [name for name, p in objective.named_parameters() if _not_finite(p.grad)]
    # Every batch is run, since processes that share weights must run the same.
    with quiet(objective):
        causes = [(_bad_input(batch), _bad_layer(objective, batch)) for batch in batches]
    for input_cause, layer_cause in causes:
        if input_cause or layer_cause:
            return input_cause or layer_cause
    ids = ", ".join(repr(name) for batch in batches for name in batch.ids[:4])
    if not gradients:
        return None
    parameter = _readable(gradients[-1])
    return f"samples {ids}, ...: the loss is finite, the gradient of {parameter} is not"


def _bad_input(batch: Batch) -> str | None:
    for column, (modality, tensors) in enumerate(batch.inputs.items()):
        for values in tree_leaves(tensors):
            if values.is_floating_point():
                finite = values.flatten(1).isfinite().all(1) | ~batch.present[:, column]
                rows = (~finite).nonzero()[:, 0].tolist()
                if rows:
                    cached = isinstance(tensors, Features)
                    kind = "cached feature" if cached else "input"
                    return f"{_sample_ids(batch, rows)}: the {kind} of {modality} is not finite"
    return None


def _bad_layer(objective: Objective, batch: Batch) -> str | None:
    """Run the batch; name the first layer whose output is not finite, and the samples."""
    bad_layers: list[str] = []
    names = {module: name for name, module in objective.named_modules() if name}

    def check(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not bad_layers and any(_not_finite(leaf) for leaf in tree_leaves(outputs)):
            bad_layers.append(names[module])

    hooks = [m.register_forward_hook(check) for m in names if not list(m.children())]
    try:
        output = objective(batch)
    finally:
        for hook in hooks:
            hook.remove()
    rows = (~output.loss.isfinite()).nonzero()[:, 0].tolist()
    if not rows and not bad_layers:
        return None
    location = f"first in {_readable(bad_layers[0])}" if bad_layers else "in the loss"
    return f"{_sample_ids(batch, rows or range(len(batch.ids)))}: not finite, {location}"


def _not_finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return not bool(value.isfinite().all())


def _sample_ids(batch: Batch, rows: Sequence[int]) -> str:
    some = ", ".join(repr(batch.ids[row]) for row in rows[:5])
    return f"samples {some}{', ...' if len(rows) > 5 else ''}"


def _readable(layer: str) -> str:
    """Turn `model.encoders.image.net.conv1` into `image: net.conv1`."""
    name = layer.removeprefix("model.")
    if name.startswith("encoders."):
        _, modality, inside = name.split(".", 2)
        return f"{modality}: {inside}"
    return name
