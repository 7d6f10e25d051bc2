"""MultiModN: a state that is handed from modality to modality, with a prediction after each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Draws, Fusion


@FUSIONS.register(
    family="hybrid", paper="Swamy et al. 2023, arXiv:2309.14118", reads="pooled", synergy=False
)
class MultiModN(Fusion):
    """Update a state by one present modality after the other; one decoder predicts after each.

    s_0 is learned; for each present m in order, s <- V_m [phi_m(x_m); s] + c_m, phi_m a linear map
    and a ReLU; logits = W s + b of the last state, which is the embedding. Loss: `encode` mean over
    the steps 0 to P of the task loss of W s_k + b + 0.01 `change` mean_k mean (s_k - s_(k-1))^2. In
    training the order is drawn for each sample, unless `shuffle` is off; evaluation uses that of
    `dims`. `extra["steps"]` (B, M + 1, K) shows how the prediction moves with each modality, where
    an absent one repeats the step before. Differs from the authors' code, which skips a modality of
    a whole batch, keeps one order and decodes by a sigmoid before the cross-entropy. The step is
    that of its `MLPEncoder`, where it has no dropout; in its MIMIC runs layers with ReLUs, the last
    one too, read [x_m; s] after dropout of 0.2.

    Missing: its step does not happen, and the loss is the mean over the steps that do. The authors'
    code divides by M + 1 steps, whatever is missing: 0.718 instead of 0.959 on rows without one.
    Without any modality the prediction is that of s_0.
    Pitfall: each step is linear in the state, so an exclusive or cannot be expressed. In one order
    (`shuffle=false`), complete samples only show a step the state that its predecessor left
    (measured: 0.66 instead of 0.85 over incomplete subsets).
    Use when: modalities arrive one by one, or the fact that one is missing must not be learned.

    Settings:
        hidden: width of phi_m, at least 1 (paper: 32)
        dropout: dropout rate on phi_m in training, 0 to below 1
        encode: weight of the task losses, above 0 (paper: 1, or 0.7)
        change: weight of the change of the state, at least 0 (paper: 0, or 0.3)
        shuffle: whether training draws the order of the modalities for each sample (paper: no)

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), extra steps (B, M + 1, K)
    """

    joins_linear = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        hidden: int = 32,
        dropout: float = 0.2,
        encode: float = 1.0,
        change: float = 0.0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        if hidden < 1 or encode <= 0 or change < 0:
            raise FusionZooError(
                f"hidden={hidden}, encode={encode}, change={change}; they must be at least 1, above"
                " 0 and at least 0"
            )
        del self.null  # the first state takes its place
        self.encode, self.change, self.shuffle = encode, change, shuffle
        self.state = nn.Parameter(torch.randn(dim))
        self.read = nn.ModuleDict({name: nn.Linear(w, hidden) for name, w in dims.items()})
        self.update = nn.ModuleDict({name: nn.Linear(hidden + dim, dim) for name in dims})
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, num_outputs)
        self.draws = Draws()

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present, pooled = self.present(features), self.pooled(features)
        read = [self.dropout(self.read[name](x).relu()) for name, x in pooled.items()]
        order = torch.arange(len(read), device=present.device).expand(present.shape[0], -1)
        shuffled = self.training and self.shuffle
        if shuffled:
            order = self.draws.uniform(*present.shape).to(present.device).argsort(dim=1)
        states = [self.state.to(read[0].dtype).expand(present.shape[0], -1)]
        for place in range(len(read)):
            columns = range(len(read)) if shuffled else [place]
            states.append(self._step(columns, read, states[-1], present, order[:, place]))
        stacked = torch.stack(states, dim=1)
        steps = self.head(stacked)
        linear = self.linear_logits(features)
        if linear is not None:  # of the modalities up to each step
            ordered = linear.gather(1, order[..., None].expand_as(linear))
            steps = steps + F.pad(ordered.cumsum(1), (0, 0, 1, 0))
        happened = present.gather(1, order)
        extra = {"steps": steps, "states": stacked, "happened": happened}
        return FusionOutput(states[-1], steps[:, -1], {}, None, extra)

    def _step(
        self,
        columns: Iterable[int],
        read: list[Tensor],
        state: Tensor,
        present: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Update the state (B, D) of each row by its chosen modality (B,), if it is present."""
        updated, names = state, [*self.dims]
        for column in columns:
            here = (chosen == column) & present[:, column]
            new = self.update[names[column]](torch.cat([read[column], state], dim=1))
            updated = torch.where(here[:, None], new.to(state.dtype), updated)
        return updated

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        steps, states, happened = (output.extra[x] for x in ("steps", "states", "happened"))
        earlier = [context.criterion(logits, target) for logits in steps.unbind(1)[:-1]]
        # The last step is the output's, which training strategies may have changed.
        last = context.criterion(output.logits, target)
        losses = torch.stack([*earlier, last], dim=1)
        # An absent modality repeats the step before; of such repeats the last one counts.
        moved = F.pad(happened, (0, 1), value=True)
        mean = losses.masked_fill(~moved, 0).sum(1) / moved.sum(1)
        change = (states[:, 1:] - states[:, :-1]).float().square().mean(-1).sum(1)
        return self.encode * mean + 0.01 * self.change * change / happened.sum(1).clamp(min=1)
