"""Unimodal linear classifiers whose loss trains the encoders."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fusionzoo.structures import StepContext

from .base import LossTerm, pooled_of


class ModalityHeads(nn.Module):
    """One linear head per modality on its pooled features, z_m = head_m(x_m).

    The loss of a head is taken over the rows that have its modality. Unlike those of
    `UnimodalHeads`, which only monitor the modalities, its gradients reach the encoders.
    """

    def __init__(self, widths: Mapping[str, int], num_outputs: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(w, num_outputs) for name, w in widths.items()})

    def losses(
        self, context: StepContext, label: str, weights: Mapping[str, float | Tensor]
    ) -> dict[str, LossTerm]:
        """Return the loss of each modality in `weights`, named `label/modality`."""
        target, terms = context.batch.target, {}
        assert target is not None
        for name, weight in weights.items():
            x, present = pooled_of(context.features, name)
            values = context.criterion(self.heads[name](x), target)
            terms[f"{label}/{name}"] = LossTerm(values, present, weight)
        return terms
