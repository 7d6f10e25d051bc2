"""I2MoE: experts for what one modality, agreement or interplay contributes, around any fusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, Draws, Fusion, RunningMeans, present_mean

MARGIN = 1.0  # by which losing a modality should change the answer more than losing another


@FUSIONS.register(family="hybrid", paper="Xin et al. 2025, arXiv:2505.19190", reads="tokens")
class I2MoE(Fusion):
    """Weight copies of a fusion that specialise in one modality, in synergy or in redundancy.

    M + 2 experts F_e are fusions of the kind `base` with parameters of their own: one for the
    uniqueness of each modality, one for synergy, one for redundancy. logits = sum_e w_e F_e(x), w =
    softmax(R [a_1; ...; a_M; p] / temperature), R an MLP, p presence bits; the embedding likewise.
    In training each expert also answers with modality m replaced by noise, o_m, beside o_0. Loss:
    task loss + interaction / (M + 2) (sum_i U_i + S + R), U_i = mean over n != i of max(0, |o_0 -
    o_n| - |o_0 - o_i| + 1), S = mean_m cos(o_0, o_m), R = mean_m (1 - cos(o_0, o_m)); for a single
    output, squared differences instead of cosines, with a margin of 1. The base's loss, if it has
    one, is added for each expert by 1 / (M + 2). `extra["expert_weights"]` (B, M + 2) says per
    sample which kind of interaction the answer came from (`model.weights(samples)`). Differs from
    the authors' code: R reads p, the experts start from different weights, and the noise has each
    feature's running mean and std instead of 0 and 1.

    Missing: the experts' own rule; R reads 0 and a presence bit. Only present modalities are
    replaced by noise, and pairs that lack one are left out of the loss.
    Pitfall: a training step costs (M + 2)(M + 1) passes through the base, a prediction M + 2. The
    interaction losses explain and cost about a point of accuracy; absence is handled as well as by
    the base: take one that handles it, or train with `modality_dropout`.
    Use when: you want to know of each sample whether one modality, agreement or interplay decided.

    Settings:
        base: name of the fusion that the experts are copies of; no wrapper, and none that is
            trained in phases
        base_options: settings of `base`
        interaction: weight of the interaction losses, at least 0 (paper: 0.01 to 0.7)
        temperature: temperature of the softmax over experts, above 0 (paper: 1 or 2)
        router_layers: layers of R, at least 1 (paper: 1 to 3)
        router_width: width of R's hidden layers, at least 1
        router_dropout: dropout rate in R, 0 to below 1
        max_modalities: number of modalities above which to refuse, as the cost grows by its square

    Shapes:
        features[name].tokens: (B, T, dims[name]), pooled (B, dims[name])
        returns: embedding (B, dim), logits (B, K), extra expert_weights (B, M + 2)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        base: str = "concat",
        base_options: Mapping[str, Any] | None = None,
        interaction: float = 0.3,
        temperature: float = 1.0,
        router_layers: int = 2,
        router_width: int = 256,
        router_dropout: float = 0.5,
        max_modalities: int = 5,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        if len(dims) > max_modalities:
            passes = (len(dims) + 2) * (len(dims) + 1)
            raise FusionZooError(
                f"{len(dims)} modalities take {passes} passes through {base!r} per training step;"
                f" to accept that, set max_modalities={len(dims)}"
            )
        if temperature <= 0 or router_layers < 1 or interaction < 0:
            raise FusionZooError(
                f"temperature={temperature}, router_layers={router_layers},"
                f" interaction={interaction}; they must be above 0, at least 1 and at least 0"
            )
        del self.null  # the experts' are used
        self.interaction, self.temperature = interaction, temperature
        self.project = self.align()
        self.expert_names = [*(f"uniqueness of {name}" for name in dims), "synergy", "redundancy"]
        settings = dict(base_options or {})
        self.experts = nn.ModuleList(
            FUSIONS.create(base, dims, dim, num_outputs, **settings) for _ in self.expert_names
        )
        self._check_base(base)
        sizes = [router_width] * (router_layers - 1)
        self.router = perceptron(
            [len(dims) * (dim + 1), *sizes, len(self.expert_names)], router_dropout
        )
        self.moments = RunningMoments(dims)
        self.draws = Draws()

    def _check_base(self, base: str) -> None:
        expert = self.experts[0]
        assert isinstance(expert, Fusion)
        parts = [part for part in expert.modules() if part is not expert]
        if len(expert.phases) > 1 or any(isinstance(part, Fusion) for part in parts):
            why = "is trained in phases" if len(expert.phases) > 1 else "wraps another fusion"
            raise FusionZooError(f"i2moe: base={base!r} {why}; choose one that does not")
        self.classes_only, self.ignores = expert.classes_only, expert.ignores
        self.learns_absence = expert.learns_absence
        self.base_has_loss = type(expert).loss is not Fusion.loss
        numbers, layers = range(len(self.experts)), expert.last_layers
        self.last_layers = tuple(f"experts.{e}.{layer}" for e in numbers for layer in layers)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        scores = self.router(torch.cat([aligned.flatten(1), present.to(aligned.dtype)], dim=1))
        weights = (scores / self.temperature).softmax(-1)
        answers: list[FusionOutput] = [expert(features) for expert in self.experts]
        expert_logits = torch.stack([answer.logits for answer in answers], dim=1)
        embeddings = torch.stack([answer.embedding for answer in answers], dim=1)
        extra = {"expert_weights": weights, "expert_logits": expert_logits, "present": present}
        if self.base_has_loss:
            for number, answer in enumerate(answers):
                extra |= _flatten(answer, number)
        if self.training:
            extra["perturbed"] = self._perturbed(features)
        logits = (weights[..., None] * expert_logits).sum(1)
        embedding = (weights[..., None] * embeddings).sum(1)
        return FusionOutput(embedding, logits, {}, None, extra)

    def shares(self, output: FusionOutput) -> dict[str, Tensor]:
        weights = output.extra["expert_weights"].unbind(1)
        return dict(zip(self.expert_names, weights, strict=True))

    def _perturbed(self, features: Mapping[str, Features]) -> Tensor:
        """Return each expert's logits with each modality replaced by noise: (B, M + 2, M, K)."""
        noise = self._noise(features)
        columns = []
        with paused_means(self.experts):
            for name in self.dims:
                replaced = {**features, name: noise[name]}
                answers = [expert(replaced).logits for expert in self.experts]
                columns.append(torch.stack(answers, dim=1))
        return torch.stack(columns, dim=2)

    def _noise(self, features: Mapping[str, Features]) -> dict[str, Features]:
        """Update the moments; return noise in place of every present modality's features."""
        tokens, pooled = self.tokens(features), self.pooled(features)
        self.moments.observe(tokens, pooled, features)
        noise = {}
        for name in self.dims:
            mask = features[name].mask
            drawn = []
            for kind, x in (("tokens", tokens[name]), ("pooled", pooled[name])):
                mean, std = self.moments.of(f"{name}_{kind}")
                normal = self.draws.normal(*x.shape).to(x.dtype)
                drawn.append(mean.to(x.dtype) + std.to(x.dtype) * normal)
            noise[name] = Features(drawn[0], mask, drawn[1])
        return noise

    def prepare(
        self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0
    ) -> nn.Module | None:
        memories = [expert.prepare(targets, groups, seed) for expert in self.experts]  # type: ignore[operator]
        return None if memories[0] is None else nn.ModuleList(memories)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        extra, share = output.extra, 1 / len(self.experts)
        loss = context.criterion(output.logits, target)
        if self.base_has_loss:
            for number, expert in enumerate(self.experts):
                memory = None if context.memory is None else context.memory[number]  # type: ignore[index]
                answer = _unflatten(output, number)
                expert_context = context._replace(output=answer, memory=memory)
                loss = loss + share * expert.loss(answer, target, expert_context)  # type: ignore[operator]
        if "perturbed" in extra:
            parts = interaction_losses(
                extra["expert_logits"].float(), extra["perturbed"].float(), extra["present"]
            )
            loss = loss + self.interaction * share * parts.sum(1)
        return loss


def _flatten(answer: FusionOutput, number: int) -> dict[str, Tensor]:
    """Return what the base's loss reads of an expert's answer, by names that hold its number."""
    parts = {"logits": answer.logits, "embedding": answer.embedding}
    parts |= {f"unimodal/{name}": x for name, x in answer.unimodal.items()}
    parts |= {f"extra/{name}": x for name, x in answer.extra.items()}
    return {f"expert {number}/{name}": x for name, x in parts.items()}


def _unflatten(output: FusionOutput, number: int) -> FusionOutput:
    """Return the answer of an expert, without its weights; the inverse of `_flatten`."""
    start = f"expert {number}/"
    parts = {k.removeprefix(start): x for k, x in output.extra.items() if k.startswith(start)}

    def group(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): x for k, x in parts.items() if k.startswith(prefix)}

    unimodal, extra = group("unimodal/"), group("extra/")
    return FusionOutput(parts["embedding"], parts["logits"], unimodal, None, extra)


def interaction_losses(answers: Tensor, perturbed: Tensor, present: Tensor) -> Tensor:
    """Return the losses of all experts: (B, E, K), (B, E, M, K) -> (B, E).

    The order of the experts is that of `I2MoE.expert_names`; `present` is (B, M).
    """
    modalities = present.shape[1]
    before = answers[:, :, None].expand_as(perturbed)
    distance = F.pairwise_distance(before, perturbed, eps=1e-7)  # (B, E, M)
    single = answers.shape[-1] == 1  # the cosine of two numbers is 1 or -1
    change = (before - perturbed).square().mean(-1) if single else distance
    losses = []
    for i in range(modalities):
        hinge = (change[:, i] - change[:, i, i, None] + MARGIN).clamp(min=0)
        others = present & present[:, i, None]
        others = others & (torch.arange(modalities, device=present.device) != i)
        losses.append(present_mean(hinge, others))
    if single:
        synergy, redundancy = -change[:, -2].clamp(max=MARGIN), change[:, -1]
    else:
        similarity = F.cosine_similarity(before, perturbed, dim=-1)
        synergy, redundancy = similarity[:, -2], 1 - similarity[:, -1]
    losses += [present_mean(synergy, present), present_mean(redundancy, present)]
    return torch.stack(losses, dim=1)


class RunningMoments(RunningMeans):
    """Running mean and standard deviation of each feature, of tokens and of pooled vectors."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__(
            {f"{m}_{kind}": 2 * w for m, w in dims.items() for kind in ("tokens", "pooled")}
        )

    def observe(
        self,
        tokens: Mapping[str, Tensor],
        pooled: Mapping[str, Tensor],
        features: Mapping[str, Features],
    ) -> None:
        """Update the moments from the real tokens and the present pooled vectors of a batch."""
        vectors, masks = {}, {}
        for name in tokens:
            mask = features[name].mask
            for kind, x, rows in (
                ("tokens", tokens[name].flatten(0, 1), mask.flatten()),
                ("pooled", pooled[name], mask.any(1)),
            ):
                vectors[f"{name}_{kind}"] = torch.cat([x, x.square()], dim=-1)
                masks[f"{name}_{kind}"] = rows
        self._update(vectors, masks)

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, (D,) each."""
        mean, square = self.mean(name).chunk(2)
        return mean, (square - mean.square()).clamp(min=0).sqrt()


@contextmanager
def paused_means(module: nn.Module) -> Iterator[None]:
    """Keep the running means of a module from learning from noise."""
    learning = [x for x in module.modules() if isinstance(x, RunningMeans) and x.training]
    for means in learning:
        means.training = False
    try:
        yield
    finally:
        for means in learning:
            means.training = True


def perceptron(sizes: Sequence[int], dropout: float) -> nn.Sequential:
    """Return an MLP of some widths, with ReLU and dropout on its hidden layers."""
    layers: list[nn.Module] = []
    for width, following in pairwise(sizes):
        layers += [nn.Linear(width, following), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])
