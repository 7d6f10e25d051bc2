"""Ensemble: average the answers of fusions that were trained apart; `--train.seeds` joins them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion

SHARE = "share."  # before the name of a part, in `extra`


@FUSIONS.register(
    family="late", paper="Lakshminarayanan et al. 2017, arXiv:1612.01474", hidden=True
)
class Ensemble(Fusion):
    """Average the answers of fusions that were trained apart, such as from other seeds.

    Logits of one class: log mean_n softmax(z_n); all others: mean_n z_n. The embedding is
    [e_1 / |e_1|, ..., e_N / |e_N|] / sqrt(N): a unit vector, and the dot product of two is the mean
    of the members' cosine similarities. Weights are the mean of the members', where all have some.

    Missing: each member handles it; their answers are averaged.
    Pitfall: costs what its members cost together.
    Use when: a few tenths of a point to a point are worth several trainings.

    Settings:
        members: settings of each fusion, its name and `dim` among them
        apart: modalities that each member encodes for itself: their features are side by side
        one_of: first logit of each target of one class, and the one after its last

    Shapes (N members):
        features[name]: as wide as dims[name], of which each member reads the N-th part if apart
        returns: embedding (B, dim), logits (B, K), weights (B, M)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        members: Sequence[Mapping[str, Any]] = (),
        apart: Sequence[str] = (),
        one_of: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        if not members:
            raise FusionZooError("fusion 'ensemble' is made by training: --train.seeds 3")
        del self.null  # the members' are used
        self.apart, self.one_of = [*apart], [(first, end) for first, end in one_of]
        own = {
            name: width // len(members) if name in apart else width for name, width in dims.items()
        }
        self.members = nn.ModuleList(_build(settings, own, num_outputs) for settings in members)
        self.own_dims = own
        widths = [member.dim for member in self.fusions()]
        if sum(widths) != dim or any(own[name] * len(members) != dims[name] for name in apart):
            raise FusionZooError(
                f"fusion 'ensemble': dim = {dim} and its modalities' widths {dict(dims)} are not"
                f" those of {len(members)} members"
            )

    def fusions(self) -> list[Fusion]:
        """Return the members."""
        return [member for member in self.members if isinstance(member, Fusion)]

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        absent = dict(zip(self.dims, (~self.present(features)).unbind(1), strict=True))
        outputs: list[FusionOutput] = [
            member(self.features_of(number, features)) for number, member in enumerate(self.members)
        ]
        parts = [F.normalize(output.embedding, dim=-1) for output in outputs]
        embedding = torch.cat(parts, dim=-1) / len(parts) ** 0.5
        names = [name for name in self.dims if all(name in x.unimodal for x in outputs)]
        alone = {name: self.average([x.unimodal[name] for x in outputs]) for name in names}
        weights = [output.weights for output in outputs if output.weights is not None]
        shares = [member.shares(x) for member, x in zip(self.fusions(), outputs, strict=True)]
        return FusionOutput(
            embedding,
            self.average([output.logits for output in outputs]),
            {name: x.masked_fill(absent[name][:, None], 0) for name, x in alone.items()},
            torch.stack(weights).mean(0) if len(weights) == len(outputs) else None,
            {f"{SHARE}{name}": _mean([x[name] for x in shares]) for name in _common(shares)},
        )

    def features_of(self, number: int, features: Mapping[str, Features]) -> dict[str, Features]:
        """Return the features that a member reads, by its number from 0."""
        read = {}
        for name, width in self.own_dims.items():
            tokens, mask, pooled = features[name]
            if name in self.apart:
                part = slice(number * width, (number + 1) * width)
                tokens, pooled = tokens[..., part], pooled[..., part]
            read[name] = Features(tokens, mask, pooled)
        return read

    def average(self, logits: Sequence[Tensor]) -> Tensor:
        """Average the members' logits (B, K): of one class their probabilities."""
        stacked = torch.stack([*logits])
        mean = stacked.mean(0)
        parts, end = [], 0
        for first, last in self.one_of:
            log_shares = stacked[..., first:last].log_softmax(-1)
            joined = log_shares.logsumexp(0) - math.log(len(logits))
            parts += [mean[..., end:first], joined.to(mean.dtype)]
            end = last
        return torch.cat([*parts, mean[..., end:]], dim=-1)

    def shares(self, output: FusionOutput) -> dict[str, Tensor]:
        prefixed = {name: x for name, x in output.extra.items() if name.startswith(SHARE)}
        return {name.removeprefix(SHARE): x for name, x in prefixed.items()}


def _build(settings: Mapping[str, Any], dims: Mapping[str, int], num_outputs: int) -> Fusion:
    rest = {key: value for key, value in settings.items() if key not in ("name", "dim")}
    return FUSIONS.create(settings["name"], dims, settings["dim"], num_outputs, **rest)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).mean(0)


def _common(shares: Sequence[Mapping[str, Tensor]]) -> list[str]:
    return [name for name in shares[0] if all(name in x for x in shares)]
