"""A batch over all processes, for losses that compare rows with one another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from fusionzoo.distributed.process_group import World, total


def gathered(x: Tensor, world: World) -> Tensor:
    """Return the rows of all processes, the same on each, of which our own carry a gradient.

    (B, ...) -> (sum of B, ...). Every process then has the whole loss L, and its gradient by its
    own rows, which is all of theirs: nothing needs to cross processes in backward, where
    collectives would meet DDP's in an order that differs from process to process. Training
    averages gradients over processes, so those of our rows are scaled up by their number; those
    of parameters that every process applies to all rows, a temperature say, are right as they are.
    """
    if world.size == 1:
        return x
    counts = torch.zeros(world.size, dtype=torch.int64, device=x.device)
    counts[world.rank] = len(x)
    sizes = total(counts, world).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x.detach()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    found = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    found[world.rank] = x.detach() + world.size * (x - x.detach())
    return torch.cat(found)


def gathered_rows(
    rows: dict[str, Tensor], present: Tensor, world: World
) -> tuple[dict[str, Tensor], Tensor]:
    """Gather (B, D) of each modality and which there are, (B, M), in one go."""
    widths = [x.shape[1] for x in rows.values()]
    bits = present.to(next(iter(rows.values())))
    *parts, bits = gathered(torch.cat([*rows.values(), bits], dim=1), world).split(
        [*widths, present.shape[1]], dim=1
    )
    return dict(zip(rows, parts, strict=True)), bits > 0.5
