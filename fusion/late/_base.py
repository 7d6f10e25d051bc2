"""Shared by the late fusions: one classifier per modality, and an embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import Fusion, present_mean, two_layer_classifier

UNIMODAL = "unimodal"  # name of a `TrainedHead` that is not a fusion: a head of `UnimodalHeads`


class LateFusion(Fusion):
    """Classify each modality, z_m = head_m(a_m) with a_m = V_m x_m; subclasses combine the z_m.

    The embedding is the mean of the present a_m. With `project=False`, z_m = head_m(x_m), and the
    embedding is the mean of the present R_m x_m, R_m a `RandomMap`: nothing is learned between x_m
    and the logits, whose K numbers would be a poor embedding of few classes. The logits of a sample
    without any modality are the learned `prior_logits`. With `linear_skip`, z_m gains W_m x_m, and
    what the rule joins, and losses of single modalities, hold it; without `project` that is one
    more map of x_m, and training starts from equal classes.

    Settings:
        project: whether a linear map V_m to the width `dim` comes before each classifier; without
            it the classifiers read x_m, and the embedding is a fixed random map of x_m, which only
            training of the encoders changes
    """

    last_layers: tuple[str, ...] = ("heads",)
    joins_linear = True
    fixed_rule = False  # whether a single modality's classes are its head's, and nothing is learned

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, project: bool = True
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.projects = project
        self.read_widths = dict.fromkeys(dims, dim) if project else dict(dims)  # `head_inputs`
        self.project = (
            self.align()
            if project
            else nn.ModuleDict({name: RandomMap(width, dim) for name, width in dims.items()})
        )
        self.heads = nn.ModuleDict(
            {name: nn.Linear(width, num_outputs) for name, width in self.read_widths.items()}
        )
        self.prior_logits = nn.Parameter(torch.zeros(num_outputs))
        self.trained_heads = nn.ModuleDict()  # of `join_heads`, instead of `project` and `heads`

    def join_heads(
        self, heads: Mapping[str, Mapping[str, Any]], create: Callable[..., Fusion]
    ) -> None:
        """Join classifiers of models trained apart, by modality, instead of linear ones.

        The embedding is then the concatenation of theirs, zeros where absent: they have no space in
        common. `create` builds a fusion.
        """
        if not isinstance(heads, Mapping) or {*heads} != {*self.dims}:
            raise FusionZooError(
                f"trained_heads must describe the head of each modality: {', '.join(self.dims)}"
            )
        self.project, self.heads = nn.ModuleDict(), nn.ModuleDict()
        self.trained_heads = nn.ModuleDict(
            {
                name: TrainedHead(heads[name], width, self.num_outputs, create)
                for name, width in self.dims.items()
            }
        )
        width = sum(head.dim for head in self._heads_by_name().values())
        if width != self.dim:
            raise FusionZooError(f"dim={self.dim}, and the trained heads are {width} wide in all")

    def _heads_by_name(self) -> dict[str, TrainedHead]:
        pairs = [(name, self.trained_heads[name]) for name in self.dims]
        return {name: head for name, head in pairs if isinstance(head, TrainedHead)}

    def unimodal_logits(self, features: Mapping[str, Features]) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedding (B, dim), logits of each modality (B, M, K), presence (B, M).

        The logits of absent modalities are zeros.
        """
        if self.trained_heads:
            return self._answers_of_trained_heads(features)
        aligned, present = self.aligned(features)
        read = self.head_inputs(features, aligned)
        unimodal = self.classify(read, present, self.linear_logits(features))
        return self.or_null(present_mean(aligned, present), present), unimodal, present

    def _answers_of_trained_heads(
        self, features: Mapping[str, Features]
    ) -> tuple[Tensor, Tensor, Tensor]:
        present = self.present(features)
        answers = [head(features[name]) for name, head in self._heads_by_name().items()]
        columns = present.unbind(1)
        embedding = torch.cat(
            [
                vectors.masked_fill(~column[:, None], 0)
                for (vectors, _), column in zip(answers, columns, strict=True)
            ],
            dim=1,
        )
        unimodal = torch.stack([logits for _, logits in answers], dim=1)
        unimodal = unimodal.masked_fill(~present[..., None], 0)
        return self.or_null(embedding, present), unimodal, present

    def head_inputs(self, features: Mapping[str, Features], aligned: Tensor) -> Sequence[Tensor]:
        """Return what the classifiers read, zeros where absent: the a_m (B, dim), or the x_m."""
        return aligned.unbind(1) if self.projects else [*self.pooled(features).values()]

    def classify(self, read: Sequence[Tensor], present: Tensor, linear: Tensor | None) -> Tensor:
        """Return the logits of each modality, zeros where absent, (B, M, K).

        `read` is the result of `head_inputs`, `linear` that of `linear_logits`.
        """
        pairs = zip(self.heads.values(), read, strict=True)
        unimodal = torch.stack([head(x) for head, x in pairs], dim=1)
        unimodal = unimodal if linear is None else unimodal + linear
        return unimodal.masked_fill(~present[..., None], 0)

    def output(
        self,
        embedding: Tensor,
        logits: Tensor,
        unimodal: Tensor,
        present: Tensor,
        weights: Tensor | None,
        **extra: Tensor,
    ) -> FusionOutput:
        """Build the output, with `prior_logits` for samples without any modality."""
        prior = self.prior_logits.to(logits.dtype)
        logits = torch.where(present.any(1)[:, None], logits, prior)
        logits_by_modality = dict(zip(self.dims, unimodal.unbind(1), strict=True))
        extra = {"present": present, **extra}
        return FusionOutput(embedding, logits, logits_by_modality, weights, extra)


class IndependentHeads(LateFusion):
    """Late fusion whose classifiers are each trained on their own loss, not on the fused logits."""

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        """Sum the losses of the present modalities; that of the prior if none is present: (B,)."""
        present = output.extra["present"]
        losses = [context.criterion(logits, target) for logits in output.unimodal.values()]
        unimodal_loss = torch.stack(losses, dim=1).masked_fill(~present, 0).sum(1)
        return torch.where(present.any(1), unimodal_loss, context.criterion(output.logits, target))


class RandomMap(nn.Module):
    """Map vectors by a random matrix that is kept and not trained: (B, width) -> (B, dim).

    Its entries have the variance 1 / dim, so that lengths and angles are kept on average, the more
    exactly the larger `dim` (Johnson and Lindenstrauss 1984), and the vectors of two modalities
    are nearly orthogonal.
    """

    weight: Tensor

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(dim, width) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TrainedHead(nn.Module):
    """One modality's classifier, as a model that was trained before has it.

    It is that model's fusion, of one modality, or its head of this modality. The logits come in the
    joint model's order of outputs, in its unit and at the temperature of the model's calibration:
    `scale * logits[:, order] + shift`.

    Settings:
        name: a fusion, whose own settings follow, or "unimodal"
        modality: what the trained model calls the modality
        dim: width of the embedding
        num_outputs: number of logits in the trained model

    Shapes:
        features.pooled: (B, width)
        returns: embedding (B, dim), logits (B, K)
    """

    order: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        settings: Mapping[str, Any],
        width: int,
        num_outputs: int,
        create: Callable[..., Fusion],
    ) -> None:
        super().__init__()
        rest = dict(settings)
        try:
            name, self.modality = rest.pop("name"), rest.pop("modality")
            self.dim, own_outputs = rest.pop("dim"), rest.pop("num_outputs")
        except KeyError as error:
            raise FusionZooError(f"a trained head has no setting {error}") from None
        self.classifier: nn.Module = (
            two_layer_classifier(width, self.dim, own_outputs)
            if name == UNIMODAL
            else create(name, {self.modality: width}, self.dim, own_outputs, **rest)
        )
        self.register_buffer("order", torch.zeros(num_outputs, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(num_outputs))
        self.register_buffer("shift", torch.zeros(num_outputs))

    def forward(self, features: Features) -> tuple[Tensor, Tensor]:
        if isinstance(self.classifier, Fusion):
            output = self.classifier({self.modality: features})
            embedding, logits = output.embedding, output.logits
        else:
            present = features.mask.any(1)[:, None]
            pooled = torch.where(present, features.pooled, 0)
            embedding = self.classifier[:-1](pooled)  # type: ignore[index]
            logits = self.classifier[-1](embedding)  # type: ignore[index]
        return embedding, logits.index_select(1, self.order) * self.scale + self.shift
