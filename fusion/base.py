"""Base class of all fusions, their registry, and helpers for masks and missing modalities."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from fusionzoo.errors import FusionZooError, check_choice, check_number, did_you_mean
from fusionzoo.ground.registry import Entry, Registry
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

DECAY = 0.99  # per batch; lets running means follow an encoder that is still training
LINEAR_SKIP = inspect.Parameter(
    "linear_skip", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool
)
# The constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit integers.
INCREMENT, FIRST, SECOND = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)
BITS = 23  # of a uniform number: its middle values are exact in float32


class Fusion(nn.Module):
    """Fuse the features of any number of modalities, any of which may be missing in any sample.

    A sample lacks a modality where its mask row is all False. Its tokens and pooled vector may then
    hold any values, NaN included, and must not affect any output. The helpers below replace them by
    exact zeros *before* any arithmetic (0 x NaN is NaN, also in the backward pass). A strategy then
    leaves absent modalities out of its sums and means; a strategy that multiplies modalities uses
    the training mean instead (`RunningMeans`). A sample without any modality is embedded as the
    learned vector `null`.

    Training calls `prepare` once, then `loss` at every step of each phase in `phases`; a strategy
    that has its own loss overrides them.

    Settings:
        linear_skip: whether a linear layer of each present modality's pooled vector is added to the
            logits, the fusion's own logits starting at zero; an option of every fusion
    """

    phases: tuple[Phase, ...] = (Phase("train", 1.0),)
    classes_only = False  # only defined for classification into one of several classes
    ignores: tuple[str, ...] = ()  # settings of `classification` that the fusion's loss cannot use
    symmetric = False  # permuting the modalities with their parameters leaves the output unchanged
    learns_absence = False  # how absence is handled is only learned from incomplete samples
    last_layers: tuple[str, ...] = ("head",)  # names of the layers that give its logits
    joins_linear = False  # its forward pass adds `linear_logits`, as it joins logits of several

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__()
        if not dims:
            raise FusionZooError("a fusion needs at least one modality: dims={'image': 512, ...}")
        for name, size in (*dims.items(), ("dim", dim), ("num_outputs", num_outputs)):
            check_number(name, size, 1)
        self.dims, self.dim, self.num_outputs = dict(dims), dim, num_outputs
        self.null = nn.Parameter(torch.zeros(dim))
        self.linear_skip: nn.ModuleDict | None = None  # of `add_linear_skip`

    @abstractmethod
    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        """Fuse `{modality: Features}`; the order of the modalities is that of `dims`."""

    def prepare(
        self, targets: Tensor, groups: Sequence[str] = (), seed: int = 0
    ) -> nn.Module | None:
        """Set up for a training split with targets (N,); return the training state of `loss`.

        `groups` holds a group name per sample: samples of one group are not independent and must
        not be separated by a split (empty: all samples are independent). `seed` is the run's seed.
        The returned module keeps its state in buffers. It is saved in checkpoints, not in the
        model, and passed to `loss` as `context.memory`.
        """
        return None

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        """Return the loss of each row, (B,); a loss over the whole batch is added to every row."""
        return context.criterion(output.logits, target)

    def shares(self, output: FusionOutput) -> dict[str, Tensor]:
        """Return how much each part counted in each sample, {name: (B,)}; {} without weights.

        Parts are the modalities, unless a fusion weights something else.
        """
        if output.weights is None:
            return {}
        return dict(zip(self.dims, output.weights.unbind(1), strict=True))

    def add_linear_skip(self) -> Self:
        """Add a linear layer of each modality's pooled vector to the logits; return the fusion.

        logits = own logits + sum over present m of W_m x_m. All W_m start at zero, and so do the
        fusion's last layers, whose biases are those of the linear model: training starts from a
        linear model, and what the fusion learns is what that lacks. The logits of each modality
        alone (`unimodal`) gain its own W_m x_m; embedding and weights stay those of the fusion.
        Each W_m learns in the phases that train the last layers.
        """
        for parameter in self._last_parameters():
            nn.init.zeros_(parameter)
        self._join_linear()
        return self

    @property
    def ends_linear(self) -> bool:
        """Whether the logits are one linear layer's, so that `average_with` can halve them."""
        if self.joins_linear or len(self.last_layers) != 1:
            return False
        try:
            biases = [x for x in self._last_parameters() if x.ndim == 1]
        except FusionZooError:
            return False
        return len(biases) == 1 and len(biases[0]) == self.num_outputs

    @torch.no_grad()
    def average_with(self, weights: Mapping[str, Tensor], bias: Tensor) -> None:
        """Let the logits be the mean of what they were and of sum_m W_m x_m + b.

        Shapes: `weights` modality -> (K, dims[modality]), `bias` (K,)
        """
        if self.linear_skip is None:
            self._join_linear()
        assert self.linear_skip is not None
        for parameter in (*self._last_parameters(), *self.linear_skip.parameters()):
            parameter.mul_(0.5)
            if parameter.ndim == 1:
                parameter.add_(bias.to(parameter) / 2)
        for name, weight in weights.items():
            of_modality = self.linear_skip.get_parameter(f"{name}.weight")
            of_modality.add_(weight.to(of_modality) / 2)

    def _last_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the layers that give the logits."""
        parts = {**dict(self.named_parameters()), **dict(self.named_modules())}
        named = [parts[layer] for layer in self.last_layers if layer in parts]
        last = [parameter for part in named for parameter in self._of_last_layer(part)]
        if not last:
            raise FusionZooError(
                f"linear_skip: {type(self).__name__} has no layer {' or '.join(self.last_layers)}"
                " that could start at zero; name those that give its logits in `last_layers`"
            )
        return last

    def _join_linear(self) -> None:
        """Add a linear layer of each modality's pooled vector, all zeros."""
        like = next(self.parameters())
        skip = nn.ModuleDict(
            {
                name: nn.Linear(width, self.linear_outputs, bias=False).to(like)
                for name, width in self.dims.items()
            }
        )
        for parameter in skip.parameters():
            nn.init.zeros_(parameter)
        self.linear_skip = skip
        self.phases = tuple(
            phase._replace(trains=(*phase.trains, "linear_skip."))
            if any(layer.startswith(phase.trains) for layer in self.last_layers)
            else phase
            for phase in self.phases
        )
        if not self.joins_linear:
            # Not a forward hook, which torch.compile leaves out of its graph.
            self.forward = self._with_linear  # type: ignore[method-assign]

    def _of_last_layer(self, part: nn.Module | nn.Parameter) -> list[nn.Parameter]:
        """Return the parameters that give a part's output: were those before zero, too, the layer
        would never learn."""
        if isinstance(part, nn.Parameter):
            return [part]
        children = [x for x in part.children() if any(True for _ in x.parameters())]
        if isinstance(part, nn.ModuleDict | nn.ModuleList):
            return [parameter for child in children for parameter in self._of_last_layer(child)]
        if isinstance(part, nn.Sequential):
            return self._of_last_layer(children[-1])
        if children:
            raise FusionZooError(
                f"linear_skip: {type(self).__name__} has layers within a {type(part).__name__}:"
                " name the one that gives its logits in `last_layers`"
            )
        return [*part.parameters()]

    @property
    def linear_outputs(self) -> int:
        """The width of each modality's linear layer."""
        return self.num_outputs

    def linear_logits(self, features: Mapping[str, Features]) -> Tensor | None:
        """Return W_m x_m, zeros where absent, (B, M, K); None without `linear_skip`."""
        if self.linear_skip is None:
            return None
        pooled = self.pooled(features)
        return torch.stack([self.linear_skip[name](x) for name, x in pooled.items()], dim=1)

    def _with_linear(self, features: Mapping[str, Features]) -> FusionOutput:
        """Run the fusion; add the linear layers to its logits, and each modality's to its own.

        Losses that answer for other subsets find the terms in `extra`, see `linear_of`.
        """
        output = type(self).forward(self, features)
        terms = self.linear_logits(features)
        assert terms is not None
        by_modality = dict(zip(self.dims, terms.unbind(1), strict=True))
        unimodal = {name: logits + by_modality[name] for name, logits in output.unimodal.items()}
        logits, extra = output.logits + terms.sum(1), {**output.extra, "linear": terms}
        return FusionOutput(output.embedding, logits, unimodal, output.weights, extra)

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
        """Return the pooled vectors (B, D), with exact zeros where the modality is absent."""
        self._check(features)
        return {
            name: torch.where(features[name].mask.any(1)[:, None], features[name].pooled, 0)
            for name in self.dims
        }

    def tokens(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        """Return the tokens (B, T, D), with exact zeros at masked positions."""
        self._check(features)
        return {
            name: torch.where(features[name].mask[..., None], features[name].tokens, 0)
            for name in self.dims
        }

    def aligned(self, features: Mapping[str, Features]) -> tuple[Tensor, Tensor]:
        """Return `a_m = project[m](x_m)`, zeros where absent, and presence: (B, M, dim), (B, M)."""
        present = self.present(features)
        pooled = self.pooled(features)
        rows = [self.project[name](x) for name, x in pooled.items()]  # type: ignore[operator, index]
        return torch.stack(rows, dim=1).masked_fill(~present[..., None], 0), present

    def or_null(self, embedding: Tensor, present: Tensor) -> Tensor:
        """Replace embeddings of samples without any modality by `null`: (B, dim), (B, M)."""
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


def linear_of(output: FusionOutput, subset: Tensor) -> Tensor | float:
    """Return what `linear_skip` adds to the logits of a subset of modalities, (B, M) -> (B, K)."""
    terms = output.extra.get("linear")
    return 0.0 if terms is None else terms.masked_fill(~subset[..., None], 0).sum(1)


class RunningMeans(nn.Module):
    """Replace a missing modality's vector by the mean of that modality's training vectors.

    For fusions that multiply modalities: the layers after the product are trained on factors of
    typical size and sign, and may never have seen the factor of a zero vector, or a factor of 1.
    The mean is 0 until the first training batch. It is updated from the rows of all processes that
    have the modality; the weight of older batches decays by `DECAY`.

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
            self._update(pooled, columns)
        return {
            name: torch.where(columns[name][:, None], x, self.mean(name).to(x.dtype))
            for name, x in pooled.items()
        }

    @torch.no_grad()
    def _update(self, pooled: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> None:
        """Update the means from vectors (B, D), zeros where absent, and presence (B,)."""
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
            mean, running_count = self.mean(name), self.get_buffer(f"count_{name}")
            running_count.mul_(DECAY).add_(count)
            weight = count / running_count.clamp(min=1e-6)
            mean.copy_(torch.lerp(mean, total / count.clamp(min=1), weight))


@dataclass(frozen=True, kw_only=True)
class FusionEntry(Entry[Fusion]):
    """Facts about one fusion."""

    reads: Literal["pooled", "tokens"] = "tokens"  # what it uses of each encoder's features
    synergy: bool = True  # whether it can express an exclusive or of two modalities
    at_least: int = 1  # modalities that it needs
    linear_skip: bool = (
        False  # whether training and benchmarks set `linear_skip`, unless told not to
    )

    def __post_init__(self) -> None:
        check_choice(f"fusion {self.name!r}: reads", self.reads, ("pooled", "tokens"))

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword-only arguments of the constructor, and the options of every fusion."""
        return {**super().parameters, LINEAR_SKIP.name: LINEAR_SKIP}

    @property
    def hints(self) -> dict[str, Any]:
        """The types of the arguments, where they can be looked up."""
        return {**super().hints, LINEAR_SKIP.name: bool}

    def to_train(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings for a new training, with `linear_skip` where it is measured to help."""
        return {LINEAR_SKIP.name: True, **settings} if self.linear_skip else dict(settings)

    def build(self, *args: Any, linear_skip: bool = False, **settings: Any) -> Fusion:
        """Call the constructor; then add what `linear_skip` asks for."""
        fusion = super().build(*args, **settings)
        return fusion.add_linear_skip() if linear_skip else fusion


FUSIONS: Registry[Fusion, FusionEntry] = Registry(
    "fusion",
    "fusionzoo zoo",
    FusionEntry,
    ("early", "late", "attention", "hybrid"),
    base=Fusion,
    default_family="early",
)


def two_layer_classifier(width: int, dim: int, num_outputs: int) -> nn.Sequential:
    """Return a classifier of a pooled vector (B, width) with one hidden layer."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, num_outputs)
    )


def masked_softmax(scores: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """Softmax over the entries where `mask` is True; exact zeros elsewhere, also if all are False.

    Rows without any True entry become all zeros instead of NaN.
    """
    floor = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(~mask, floor).softmax(dim)
    return weights.masked_fill(~mask, 0)


def present_mean(stacked: Tensor, present: Tensor) -> Tensor:
    """Average over the present modalities: (B, M, ...), (B, M) -> (B, ...)."""
    mask = present.reshape(*present.shape, *[1] * (stacked.ndim - 2))
    masked = stacked.masked_fill(~mask, 0)
    return masked.sum(1) / mask.sum(1).clamp(min=1).to(stacked.dtype)


def equal_weights(present: Tensor, like: Tensor) -> Tensor:
    """Return the weight 1 / P for each of the P present modalities, else 0: (B, M)."""
    return (present / present.sum(1, keepdim=True).clamp(min=1)).to(like.dtype)


def combination_of(present: Tensor) -> Tensor:
    """Encode the presence pattern as an integer: 0 = complete, 2^M - 1 = empty; (B, M) -> (B,)."""
    bits = 2 ** torch.arange(present.shape[1], device=present.device)
    return ((~present) * bits).sum(1)


def product(stacked: Tensor) -> Tensor:
    """Multiply over the modalities: (B, M, ...) -> (B, ...).

    An absent modality contributes the factor of its training mean (`RunningMeans`), not 1, because
    the following layers were trained on factors of typical size and sign.
    """
    return reduce(torch.mul, stacked.unbind(1))


def power_norm(x: Tensor, dim: int = -1) -> Tensor:
    """Apply the signed square root, smoothed at 0 where its slope is infinite, and L2-normalise."""
    return F.normalize(x / (x.abs() + 1e-6).sqrt(), dim=dim)


class Draws(nn.Module):
    """Draw random numbers that depend on no other draw, and that a checkpoint restores.

    Number i of call n is splitmix64 of the seed, n, the process and i. It is computed by tensor
    operations on the device: equal on all devices, without a generator to copy or to synchronise.
    The seed is drawn when the module is built.
    """

    state: Tensor  # (2,) int64: the seed, and the number of calls so far

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "state", torch.cat([torch.randint(2**62, (1,)), torch.zeros(1).long()])
        )

    def uniform(self, *shape: int) -> Tensor:
        """Draw float32 numbers between 0 and 1, both excluded."""
        seed, calls = self.state.unbind()
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        stream = _mix(_mix(seed + calls * INCREMENT) + rank * INCREMENT)
        self.state[1] += 1
        index = torch.arange(1, math.prod(shape) + 1, device=self.state.device)
        bits = _shift(_mix(stream + index * INCREMENT), 64 - BITS)
        return ((bits.float() + 0.5) * 2.0**-BITS).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Draw float32 numbers from the standard normal distribution (Box and Muller 1958)."""
        radius, angle = self.uniform(2, *shape).unbind()
        return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mix(x: Tensor) -> Tensor:
    """Return the finaliser of splitmix64; products wrap around."""
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; `>>` fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
