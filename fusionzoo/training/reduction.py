"""From per-sample losses to one number: means over the rows of all processes.

The loss is the mean over all rows of all processes, so N processes with batch B have the gradients
of one process with batch N x B, whatever rows or modalities each of them lacks. DDP averages
gradients over processes; so each process divides its sum by the *average* process's number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusionzoo.distributed.process_group import World, total

from .balance import Balance, LossTerm, MeanLoss
from .objective import ObjectiveOutput


class BatchCounts(NamedTuple):
    """Row counts of a batch over all processes, and whether any of them was asked to stop."""

    rows: int  # on all processes together
    mean_rows: list[float]  # per process: all rows, then those with each modality; above zero
    stop: bool


class Losses(NamedTuple):
    """The scalar losses of a batch on this process."""

    main: Tensor
    extra: (
        Tensor | float
    )  # of strategies: counted with `main`, or with a backward pass of their own
    unimodal: Tensor | float  # of the modalities' own heads, summed
    named: dict[str, Tensor]  # for the log, detached


def count_rows(present: Tensor, stop: bool, world: World) -> BatchCounts:
    """Sum the rows of a batch, (B, M) of presence, over the processes."""
    local = torch.tensor([int(stop), len(present), *present.sum(0).tolist()], dtype=torch.float64)
    stopped, *counts = total(local, world).tolist()
    return BatchCounts(
        int(counts[0]), [max(count, 1) / world.size for count in counts], bool(stopped)
    )


def reduce_losses(
    output: ObjectiveOutput,
    counts: BatchCounts,
    turn: str | None,
    world: World,
    strategies: Sequence[Balance] = (),
) -> Losses:
    """Average the losses of a batch; the strategies may then weigh them.

    Losses of a strategy with a backward pass of its own are `extra` by themselves; all others are
    added to the main loss or stand beside it.
    """
    rows, *rows_with = counts.mean_rows
    unimodal = [
        loss.sum() / count
        for loss, count in zip(output.unimodal_loss.values(), rows_with, strict=False)
    ]
    named = {
        f"{name} alone": loss.detach()
        for name, loss in zip(output.unimodal_loss, unimodal, strict=True)
        if turn in (None, name)
    }
    if output.main_loss is None:
        return Losses(output.loss.sum() / rows, 0.0, sum(unimodal), named)
    terms = {"": output.main_loss, **output.extra_losses, **output.separate_losses}
    by_name = dict(zip(terms, mean_over_rows(list(terms.values()), world), strict=True))
    named |= {name: mean.value.detach() for name, mean in by_name.items() if name}
    for strategy in strategies:
        by_name = {**by_name, **strategy.weigh(by_name)}
    means = [mean.value for mean in by_name.values()]
    num_extra = len(output.extra_losses)
    extra = sum(means[1 : 1 + num_extra])
    if output.separate_losses:
        separate = sum(means[1 + num_extra :])
        return Losses(means[0] + extra, separate, sum(unimodal), named)
    return Losses(means[0], extra, sum(unimodal), named)


def mean_over_rows(terms: Sequence[LossTerm], world: World) -> list[MeanLoss]:
    """Average each term over the rows where it holds, on all processes.

    Returned is this process's weighted share, so that the mean over processes is the mean over all
    rows.
    """
    counts = torch.stack([term.mask.sum() for term in terms]).double()
    all_rows = total(counts, world)
    counts = all_rows.clamp(min=1) / world.size
    return [
        MeanLoss(
            term.weight
            * torch.where(term.mask, term.values, 0).sum()
            / count.to(term.values.dtype),
            rows,
        )
        for term, count, rows in zip(terms, counts, all_rows, strict=True)
    ]
