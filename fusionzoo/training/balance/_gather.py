"""Gather a batch from all processes, for losses that compare rows with one another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from fusionzoo.distributed.process_group import World, total


def gathered(x: Tensor, world: World) -> Tensor:
    """Gather the rows of all processes; only this process's rows carry a gradient.

    (B, ...) -> (sum of B, ...). Every process then computes the full loss and its gradient with
    respect to its own rows. The backward pass needs no communication, which could interleave with
    DDP's collectives in a different order on each process. Training averages gradients over the
    processes, so the gradient of the local rows is scaled up by the number of processes; that of
    parameters applied to all rows on every process, such as a temperature, is correct unscaled.
    """
    if world.size == 1:
        return x
    counts = torch.zeros(world.size, dtype=torch.int64, device=x.device)
    counts[world.rank] = len(x)
    sizes = total(counts, world).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x.detach()
    padded_by_rank = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(padded_by_rank, padded)
    rows_by_rank = [y[:size] for y, size in zip(padded_by_rank, sizes, strict=True)]
    rows_by_rank[world.rank] = x.detach() + world.size * (x - x.detach())
    return torch.cat(rows_by_rank)


def gathered_rows(
    rows: dict[str, Tensor], present: Tensor, world: World
) -> tuple[dict[str, Tensor], Tensor]:
    """Gather vectors (B, D) of each modality and presence (B, M) in one collective."""
    widths = [x.shape[1] for x in rows.values()]
    bits = present.to(next(iter(rows.values())))
    *parts, bits = gathered(torch.cat([*rows.values(), bits], dim=1), world).split(
        [*widths, present.shape[1]], dim=1
    )
    return dict(zip(rows, parts, strict=True)), bits > 0.5
