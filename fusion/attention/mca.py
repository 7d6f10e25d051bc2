"""Multimodal channel attention: fusion tokens for every subset of modalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, check_number
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS
from ._blocks import Streams


@FUSIONS.register(family="attention", paper="Bjorgaard 2024, arXiv:2403.20280", reads="tokens")
class MCA(Streams):
    """Give each subset of modalities fusion tokens of its own; answer by the present subset.

    As in `zorro`, with one block of fusion tokens for each channel, a subset of two or more
    modalities: they attend to the tokens of these modalities and to one another. A learned query
    for each modality and channel pools its tokens; one head classifies them all. The embedding and
    the logits are those of the channel of exactly the present modalities. Loss: mean CE over all
    channels, and modalities alone, of which nothing is missing. Differs from the paper, which
    trains by contrastive losses, and from its code, which trains a channel if any of its modalities
    is present: here only if all are, so that a channel reads the same in training and evaluation.

    Missing: answers the channel of the present modalities, which complete samples train too; with
    `sizes`, the largest channel or modality without missing ones, the first of equal size. In
    training, a channel of which any modality is missing adds no loss.
    Pitfall: five modalities have 26 channels and attention over 26 `channel_tokens` further tokens;
    more than five need `sizes`. With a few hundred samples a linear classifier of pooled features
    does better (docs/which.md).
    Use when: any subset may be missing at test time, while the training samples are complete.

    Settings:
        sizes: sizes of the subsets that get a channel, each 2 to the number of modalities; null
            for all of them
        channel_tokens: fusion tokens per channel, at least 1 (paper: 16 for all channels together)
        num_layers: number of transformer blocks, at least 1
        num_heads: attention heads per block; must divide `dim` (paper: 8)
        dropout: dropout rate on the output of each attention and MLP, 0 to below 1

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    joins_linear = True
    MOST_MODALITIES = 5  # with a channel for every subset

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        sizes: Sequence[int] | None = None,
        channel_tokens: int = 4,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        check_number("channel_tokens", channel_tokens, 1)
        channels = self.subsets(len(dims), sizes)
        super().__init__(
            dims, dim, num_outputs, channels, channel_tokens, num_layers, num_heads, dropout
        )

    def subsets(self, count: int, sizes: Sequence[int] | None) -> list[tuple[int, ...]]:
        """Return the subsets of `count` modalities that get a channel, small ones first."""
        if sizes is None and count > self.MOST_MODALITIES:
            raise FusionZooError(
                f"{count} modalities have {2**count - 1 - count} subsets, too many for a channel"
                f" each; name the sizes of those that need one, such as sizes=[2, {count}]"
            )
        sizes = range(2, count + 1) if sizes is None else sorted({*sizes})
        for size in sizes:
            if not 2 <= size <= count:
                raise FusionZooError(f"sizes holds {size}, which is not within 2 to {count}")
        return [subset for size in sizes for subset in combinations(range(count), size)]

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        vectors = self.pooled_streams(features)
        logits = self.head(vectors)
        complete, answer = self._choose(present)
        index = answer[:, None, None]
        embedding = vectors.gather(1, index.expand(-1, 1, self.dim))[:, 0]
        embedding = self.or_null(embedding, present)
        answer_logits, linear = self.head(embedding), self.linear_logits(features)
        if linear is not None:  # each stream's share: that of the modalities that it reads
            members = self._reads(present.device)[:, : len(self.dims)]
            terms = members.to(linear.dtype) @ linear
            logits = logits + terms
            answer_logits = (
                answer_logits + terms.gather(1, index.expand(-1, 1, self.num_outputs))[:, 0]
            )
        masked = logits.masked_fill(~complete[..., None], 0)
        unimodal = dict(zip(self.dims, masked.unbind(1)[: len(self.dims)], strict=True))
        extra = {"stream_logits": masked, "complete": complete}
        return FusionOutput(embedding, answer_logits, unimodal, None, extra)

    def _choose(self, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return which streams lack no modality, (B, M + Q), and the one that answers, (B,)."""
        members = self._reads(present.device)[:, : len(self.dims)]
        complete = (present[:, None] | ~members).all(-1)
        rank = members.sum(1) * len(members) - torch.arange(len(members), device=present.device)
        return complete, (complete * rank).argmax(1)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        complete = output.extra["complete"]
        streams = output.extra["stream_logits"].unbind(1)
        losses = torch.stack([context.criterion(logits, target) for logits in streams], dim=1)
        mean = losses.masked_fill(~complete, 0).sum(1) / complete.sum(1).clamp(min=1)
        return torch.where(complete.any(1), mean, context.criterion(output.logits, target))
