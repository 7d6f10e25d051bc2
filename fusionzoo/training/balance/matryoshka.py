"""Matryoshka representation learning: the first entries of the embedding must do by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusionzoo.config import RunConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, listed_strategies

SHORTEST = 8  # entries, where no sizes are named


@BALANCE.register(family="loss", paper="Kusupati et al. 2022, NeurIPS, arXiv:2205.13147")
class Matryoshka(Balance):
    """Add the loss of a linear head on each prefix of the fused embedding.

    L = L_fusion + lambda sum_k CE(W_k z[1..k] + c_k, y), z the fused embedding, k from `sizes`. The
    most important entries thus come first, and a vector may be cut to any of the sizes. Differs
    from the paper: the whole embedding has the fusion's own loss and head instead of a linear one.

    Missing: no special case: a sample counts with whatever embedding the fusion gives it.
    Pitfall: many small sizes cost accuracy at full width; `embed.py --matryoshka` writes any
    prefix, trained or not.
    Use when: embeddings are stored or searched by the million and must be short.

    Settings:
        sizes: lengths of the prefixes, each from 1 to the fused width; empty: half of it, a quarter
            and so on down to 8
        weight: weight lambda of the loss of each prefix, at least 0; 0 switches it off

    Shapes: output.embedding (B, dim) -> a loss per row and prefix (B,)
    """

    raw_inputs = False
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        sizes: Sequence[int] = (),
        weight: float = 1.0,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        dim = self.fusion.dim
        self.require(
            inputs.model.targets != [],
            "it needs a target; for contrastive training alone there is"
            " --balance_settings.contrastive_align.prefixes",
        )
        for size in sizes:
            self.require(1 <= size <= dim, f"sizes: {size}, and the fused vector has {dim} entries")
        self.prefixes, self.weight = sorted({*sizes}) or halves(dim), weight
        outputs = self.fusion.num_outputs
        self.heads = nn.ModuleDict({str(size): nn.Linear(size, outputs) for size in self.prefixes})

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        target, embedding, terms = context.batch.target, context.output.embedding, {}
        assert target is not None
        mask = torch.ones(len(embedding), dtype=torch.bool, device=embedding.device)
        for size, head in self.heads.items():
            values = context.criterion(head(embedding[:, : int(size)]), target)
            terms[f"{self.name}/{size}"] = LossTerm(values, mask, self.weight)
        return terms


def halves(dim: int) -> list[int]:
    """Return half of a width, a quarter and so on down to `SHORTEST`; at least one size.

    >>> halves(100), halves(8)
    ([12, 25, 50], [4])
    """
    sizes = [max(1, dim // 2)]
    while sizes[0] // 2 >= SHORTEST:
        sizes.insert(0, sizes[0] // 2)
    return sizes


def prefix_sizes(setting: str | int | Sequence[int], flag: str = "--matryoshka") -> list[int]:
    """Read sizes of prefixes.

    >>> prefix_sizes("128, 64")
    [64, 128]
    """
    words: list[Any] = setting.split(",") if isinstance(setting, str) else []
    words = words or ([setting] if isinstance(setting, int) else list(setting))
    try:
        sizes = sorted({int(word) for word in words if str(word).strip()})
    except ValueError:
        raise FusionZooError(f"{flag} {setting!r}: expected sizes such as 64,128,256") from None
    if sizes and sizes[0] < 1:
        raise FusionZooError(f"{flag} {sizes[0]}: a size is at least 1")
    return sizes


def with_matryoshka(
    cfg: RunConfig, has_target: bool
) -> tuple[str | Sequence[str], Mapping[str, Mapping[str, Any]]]:
    """Return the training strategies and their settings, with those of `--matryoshka`.

    Without a target, only the vectors that `contrastive_align` aligns are trained.
    """
    sizes = prefix_sizes(cfg.matryoshka)
    if not sizes:
        return cfg.balance, cfg.balance_settings
    names = listed_strategies(cfg.balance)
    added = {"contrastive_align": {"prefixes": sizes}} if "contrastive_align" in names else {}
    if has_target:
        names = [*names, *({"matryoshka"} - {*names})]
        added["matryoshka"] = {"sizes": sizes}
    settings = {
        name: {**added.get(name, {}), **cfg.balance_settings.get(name, {})}
        for name in {**cfg.balance_settings, **added}
    }
    return names, settings
