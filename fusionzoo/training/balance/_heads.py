"""A linear classifier of each modality alone, whose loss does reach the encoder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fusionzoo.structures import StepContext

from .base import LossTerm, pooled_of


class ModalityHeads(nn.Module):
    """z_m = head_m(x_m) of each modality's pooled features; its loss counts where it is present.

    Not `UnimodalHeads`, which only watch: no gradient of theirs reaches an encoder.
    """

    def __init__(self, widths: Mapping[str, int], num_outputs: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(w, num_outputs) for name, w in widths.items()})

    def losses(
        self, context: StepContext, label: str, weights: Mapping[str, float | Tensor]
    ) -> dict[str, LossTerm]:
        """Return the loss of each modality of `weights`, named `label/modality`."""
        target, found = context.batch.target, {}
        assert target is not None
        for name, weight in weights.items():
            x, present = pooled_of(context.features, name)
            values = context.criterion(self.heads[name](x), target)
            found[f"{label}/{name}"] = LossTerm(values, present, weight)
        return found
