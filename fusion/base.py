"""What every fusion shares: the registry, the contract's masks, the answer to "nothing is there".

Shapes: `B` batch, `M` modalities, `T` tokens, `D` width, `K` outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.registry import Registry
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

DECAY = 0.99  # of older batches in running means, which so follow an encoder that learns


class Fusion(nn.Module):
    """Join the features of any number of modalities, any of them missing in any sample.

    A sample lacks a modality where its mask row is all False; what its tokens and pooled vector
    hold there may be anything, NaN included, and must reach no output. The helpers below replace it
    by exact zeros *before* arithmetic (0 x NaN is NaN, also in backward). A strategy then
    leaves the absent modality out of its sums and means; one that multiplies modalities puts the
    training mean of its vectors there (`RunningMeans`). A sample with no modality at all is
    embedded as the learned vector `null`.

    Training calls `prepare` once, then `loss` at every step of every phase of `phases`; a strategy
    with a loss of its own overrides them.
    """

    phases: tuple[Phase, ...] = (Phase("train", 1.0),)
    classes_only = False  # whether its logits can only be those of one class out of several
    ignores: tuple[str, ...] = ()  # settings of `classification` that its own loss cannot honour
    symmetric = False  # whether modalities may swap places, each with its own parameters
    learns_absence = False  # whether only incomplete training samples teach it what absence means

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__()
        if not dims:
            raise FusionZooError("a fusion needs at least one modality: dims={'image': 512, ...}")
        for what, size in (*dims.items(), ("dim", dim), ("num_outputs", num_outputs)):
            if size < 1:
                raise FusionZooError(f"{what} = {size}; it must be at least 1")
        self.dims, self.dim, self.num_outputs = dict(dims), dim, num_outputs
        self.null = nn.Parameter(torch.zeros(dim))

    @abstractmethod
    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        """Fuse `{modality: Features}`; the order of the modalities is that of `dims`."""

    def prepare(
        self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0
    ) -> nn.Module | None:
        """Get ready for a training split with these targets (N,); return what `loss` remembers.

        `groups` has a name for each sample: samples of one group are not independent, and must not
        stand on both sides of a split (empty: all are independent). `seed` is that of the run.
        What is returned holds its state in buffers: it is kept in checkpoints, not in the model,
        and comes back as `moment.memory`.
        """
        return None

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        """Return the loss of each row, (B,); a term over the batch is added to every row."""
        return context.criterion(output.logits, target)

    def align(self) -> nn.ModuleDict:
        """Return a linear map to the fusion's width for each modality."""
        return nn.ModuleDict(
            {name: nn.Linear(width, self.dim) for name, width in self.dims.items()}
        )

    def present(self, features: Mapping[str, Features]) -> Tensor:
        """Return which modalities each sample has, (B, M)."""
        self._check(features)
        return torch.stack([features[name].mask.any(1) for name in self.dims], dim=1)

    def pooled(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return the pooled vectors (B, D), exact zeros where the modality is absent."""
        self._check(features)
        return {
            name: torch.where(features[name].mask.any(1)[:, None], features[name].pooled, 0)
            for name in self.dims
        }

    def tokens(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return the tokens (B, T, D), exact zeros where there is none."""
        self._check(features)
        return {
            name: torch.where(features[name].mask[..., None], features[name].tokens, 0)
            for name in self.dims
        }

    def aligned(self, features: Mapping[str, Features]) -> tuple[Tensor, Tensor]:
        """Return a_m = project[m](x_m), zeros where absent, and presence: (B, M, dim), (B, M)."""
        present = self.present(features)
        pooled = self.pooled(features)
        rows = [self.project[name](x) for name, x in pooled.items()]  # type: ignore[operator, index]
        return torch.stack(rows, dim=1).masked_fill(~present[..., None], 0), present

    def or_null(self, embedding: Tensor, present: Tensor) -> Tensor:
        """Put `null` where a sample has no modality: (B, dim), (B, M) -> (B, dim)."""
        return torch.where(present.any(1)[:, None], embedding, self.null.to(embedding.dtype))

    def _check(self, features: Mapping[str, Features]) -> None:
        for name, width in self.dims.items():
            if name not in features:
                raise FusionZooError(
                    f"no features of modality {name!r}.{did_you_mean(name, features)}"
                    " A sample that lacks it still has a row, with an empty mask."
                )
            if features[name].tokens.shape[-1] != width:
                raise FusionZooError(
                    f"features of {name!r} are {features[name].tokens.shape[-1]} wide;"
                    f" this fusion was built for {width}"
                )


class RunningMeans(nn.Module):
    """Put the training mean of a modality's vectors where a sample lacks it.

    The weights behind a product have learned with factors of their usual size and sign; that of a
    zero vector, or a factor of 1, they may never have met. Until the first training batch the mean
    is 0. A batch's mean is taken over the rows that have the modality, on all processes, and never
    reads the others; the weights of older batches decay by `DECAY`.

    Shapes: `forward({modality: (B, D)}, (B, M))` returns {modality: (B, D)}.
    """

    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__()
        for name, width in dims.items():
            self.register_buffer(f"mean_{name}", torch.zeros(width))
            self.register_buffer(f"count_{name}", torch.zeros(1))

    def mean(self, name: str) -> Tensor:
        """Return the running mean of a modality, (D,)."""
        return self.get_buffer(f"mean_{name}")

    def forward(self, pooled: Mapping[str, Tensor], present: Tensor) -> dict[str, Tensor]:
        columns = dict(zip(pooled, present.unbind(1), strict=True))
        if self.training:
            self._follow(pooled, columns)
        return {
            name: torch.where(columns[name][:, None], x, self.mean(name).to(x.dtype))
            for name, x in pooled.items()
        }

    @torch.no_grad()
    def _follow(self, pooled: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> None:
        """Take in a batch of vectors (B, D), zeros where absent, and of presence (B,)."""
        dtype = next(self.buffers()).dtype
        totals = torch.cat(
            [
                torch.cat([columns[name].sum(0, keepdim=True).to(dtype), x.sum(0, dtype=dtype)])
                for name, x in pooled.items()
            ]
        )
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(totals)
        parts = totals.split([size for x in pooled.values() for size in (1, x.shape[1])])
        for name, count, total in zip(pooled, parts[::2], parts[1::2], strict=True):
            mean, seen = self.mean(name), self.get_buffer(f"count_{name}")
            seen.mul_(DECAY).add_(count)
            share = count / seen.clamp(min=1e-6)
            mean.copy_(torch.lerp(mean, total / count.clamp(min=1), share))


FUSIONS: Registry[Fusion] = Registry("fusion", "fusionzoo zoo")


def masked_softmax(scores: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """Softmax over the entries where `mask` holds; exact zeros elsewhere, even where none does."""
    floor = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(~mask, floor).softmax(dim)
    return weights.masked_fill(~mask, 0)


def present_mean(stacked: Tensor, present: Tensor) -> Tensor:
    """Average over the modalities that are there: (B, M, ...), (B, M) -> (B, ...)."""
    mask = present.reshape(*present.shape, *[1] * (stacked.ndim - 2))
    kept = stacked.masked_fill(~mask, 0)
    return kept.sum(1) / mask.sum(1).clamp(min=1).to(stacked.dtype)


def equal_weights(present: Tensor, like: Tensor) -> Tensor:
    """Share out one evenly among what is present: (B, M)."""
    return (present / present.sum(1, keepdim=True).clamp(min=1)).to(like.dtype)


def combination_of(present: Tensor) -> Tensor:
    """Number what is there: 0 = everything, 2^M - 1 = nothing; (B, M) -> (B,)."""
    bits = 2 ** torch.arange(present.shape[1], device=present.device)
    return ((~present) * bits).sum(1)


def product(stacked: Tensor) -> Tensor:
    """Multiply over the modalities: (B, M, ...) -> (B, ...).

    An absent modality's factor is that of its mean vector (`RunningMeans`), not 1: what follows has
    learned with a factor of the usual size and sign.
    """
    return reduce(torch.mul, stacked.unbind(1))


def power_norm(x: Tensor, dim: int = -1) -> Tensor:
    """Take signed square roots, then scale to unit length; smooth at 0, where the root is not."""
    return F.normalize(x / (x.abs() + 1e-6).sqrt(), dim=dim)


def check_choice(what: str, given: str, choices: tuple[str, ...]) -> None:
    """Refuse a setting that is none of the choices."""
    if given not in choices:
        raise FusionZooError(f"{what}={given!r} is neither {' nor '.join(map(repr, choices))}")


def check_modality(what: str, given: str | None, dims: Mapping[str, int]) -> str:
    """Resolve the name of a modality, None meaning the first, and refuse one that is not there."""
    name = next(iter(dims)) if given is None else given
    if name not in dims:
        raise FusionZooError(
            f"{what}={name!r} is no modality.{did_you_mean(name, dims)}"
            f" There are: {', '.join(dims)}."
        )
    return name


def check_heads(dim: int, num_heads: int) -> None:
    """Refuse a number of heads that does not divide the width."""
    if dim % num_heads:
        divisors = [n for n in range(1, dim + 1) if dim % n == 0 and n <= 2 * num_heads]
        raise FusionZooError(f"num_heads={num_heads} does not divide dim={dim}; {divisors} do")
