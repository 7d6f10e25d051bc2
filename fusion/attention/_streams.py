"""A transformer whose fusion tokens read the modalities, which do not read one another.

Shapes: `B` batch, `M` modalities, `Q` channels, `S` tokens of all of them, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.structures import Features

from ._blocks import Attention, Block, TokenFusion


class Streams(TokenFusion):
    """Run the tokens of all modalities and learned fusion tokens through one masked transformer.

    A token of modality m attends to the tokens of m only. The fusion tokens form `channels`, each a
    group of modalities (columns): those of a channel attend to its modalities' tokens and to one
    another. After the last block, a learned query for each modality and channel pools its tokens.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        channels: Sequence[Sequence[int]],
        channel_tokens: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.channels = [tuple(channel) for channel in channels]
        self.fusion_tokens = nn.Parameter(torch.randn(len(channels), channel_tokens, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.queries = nn.ParameterDict({name: torch.randn(dim) * 0.02 for name in dims})
        self.channel_queries = nn.Parameter(torch.randn(len(channels), dim) * 0.02)
        self.pool = Attention(dim, num_heads)

    def pooled_streams(self, features: Mapping[str, Features]) -> Tensor:
        """Return a vector for each modality, then for each channel: (B, M + Q, D).

        That of a modality or channel without any token is its query.
        """
        embedded, masks = self.embedded(features)
        x, mask = torch.cat([*embedded.values()], dim=1), torch.cat([*masks.values()], dim=1)
        fusion_tokens = self.fusion_tokens.flatten(0, 1).to(x.dtype)
        x = torch.cat([x, fusion_tokens.expand(len(x), -1, -1)], dim=1)
        mask = F.pad(mask, (0, len(fusion_tokens)), value=True)
        stream = self._stream_of_tokens(masks)
        reads = self._reads(mask.device)
        visible = mask[:, None] & reads[stream][:, stream]
        x = self.norm(self.transform(x, visible))
        queries = torch.cat(
            [torch.stack([self.queries[name] for name in self.dims]), self.channel_queries]
        )
        queries = queries.to(x.dtype).expand(len(x), -1, -1)
        own_tokens = torch.arange(queries.shape[1], device=mask.device)[:, None] == stream
        return queries + self.pool(queries, x, mask[:, None] & own_tokens)

    def transform(self, x: Tensor, visible: Tensor) -> Tensor:
        """Run x (B, S, D) through all blocks; t attends to s where visible (B, t, s) is True."""
        for block in self.blocks:
            x = block(x, visible)
        return x

    def _stream_of_tokens(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the number of the modality, or M + that of the channel, of each token: (S,)."""
        lengths = [mask.shape[1] for mask in masks.values()]
        lengths += [self.fusion_tokens.shape[1]] * len(self.channels)
        device = self.fusion_tokens.device
        pieces = [torch.full((n,), number, device=device) for number, n in enumerate(lengths)]
        return torch.cat(pieces)

    def _reads(self, device: torch.device) -> Tensor:
        """Return which streams attend to which others: (M + Q, M + Q)."""
        count = len(self.dims) + len(self.channels)
        rows = [
            [column in ({row} | self._members(row)) for column in range(count)]
            for row in range(count)
        ]
        return torch.tensor(rows, device=device)

    def _members(self, stream: int) -> set[int]:
        """Return the modalities that a stream reads."""
        count = len(self.dims)
        return {stream} if stream < count else set(self.channels[stream - count])
