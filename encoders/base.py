"""Base classes of encoders and processors, their registry, and layers that encoders share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fusionzoo.errors import FusionZooError, check_heads, check_known, did_you_mean
from fusionzoo.ground.registry import Entry, Registry
from fusionzoo.structures import ITEM_COUNTS, KINDS, Features, evaluating, masked_mean

MODES = ("none", "all", "all_but_last_<n>", "norm")
Item = dict[str, Tensor]
SCHEMES: dict[str, Callable[..., Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_normal": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "normal": partial(nn.init.normal_, std=0.02),
    "constant": partial(nn.init.constant_, val=0.0),
}
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def mean_pooled(tokens: Tensor, mask: Tensor) -> Features:
    """Return features whose pooled vector is the mean of the real tokens."""
    return Features(tokens, mask, masked_mean(tokens, mask))


def unmasked(tokens: Tensor, pooled: Tensor | None = None) -> Features:
    """Return features whose tokens are all real; without a pooled vector it is their mean."""
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return mean_pooled(tokens, mask) if pooled is None else Features(tokens, mask, pooled)


def one_token(pooled: Tensor) -> Features:
    """Return vectors (B, D) as features of one token each."""
    return unmasked(pooled[:, None], pooled)


def encode_items(
    encode: Callable[[Mapping[str, Tensor]], Features], inputs: Mapping[str, Tensor]
) -> Features:
    """Encode items as rows of their own; a sample's tokens are those of its items, in order.

    The pooled vector is the mean over the items. Padding items are not encoded.

    Shapes: inputs (B, I, ...) and `ITEM_COUNTS` (B,) -> (B, I T or fewer, D), mask, (B, D)
    """
    counts = inputs[ITEM_COUNTS]
    tensors = {name: x for name, x in inputs.items() if name != ITEM_COUNTS}
    most = next(iter(tensors.values())).shape[1]
    is_real = torch.arange(most, device=counts.device) < counts[:, None]  # (B, I)
    places = is_real.flatten().nonzero()[:, 0]
    flat = encode({name: x.flatten(0, 1)[places] for name, x in tensors.items()})

    def by_sample(x: Tensor) -> Tensor:
        padded = x.new_zeros(is_real.numel(), *x.shape[1:]).index_copy(0, places, x)
        return padded.unflatten(0, is_real.shape)

    tokens, mask = by_sample(flat.tokens).flatten(1, 2), by_sample(flat.mask).flatten(1, 2)
    pooled = by_sample(flat.pooled).sum(1) / counts[:, None].to(flat.pooled.dtype)
    return Features(*_without_gaps(tokens, mask), pooled)


def _without_gaps(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the real tokens of each row to its front, and cut what no row needs."""
    longest = int(mask.sum(1).max())
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    index = order[..., None].expand(-1, -1, tokens.shape[-1])
    return tokens.gather(1, index), mask.gather(1, order)


def layer_numbers(module: nn.Module) -> dict[str, int]:
    """Map the name of each parameter to the number of its layer, 0 at the input.

    Layers that no feature of an encoder depends on are none: their parameters have number 0.

    >>> layer_numbers(nn.Sequential(nn.Linear(1, 1, False), nn.ReLU(), nn.Linear(1, 1, False)))
    {'0.weight': 0, '2.weight': 1}
    """
    unread: frozenset[str] = frozenset()
    if isinstance(module, Encoder):
        if module.unread is None:
            module.unread = unread_parameters(module)
        unread = module.unread
    read = {name: p.numel() for name, p in module.named_parameters() if name not in unread}
    net = getattr(module, "net", None)
    if isinstance(net, nn.Module) and hasattr(net, "group_matcher"):
        return _timm_layer_numbers(module, net, read)
    layers = _transformer_blocks(module, read) or _children(module, read)
    numbers, number = {}, 0
    for name, _ in module.named_parameters():
        matches = [i for i, layer in enumerate(layers) if f"{name}.".startswith(f"{layer}.")]
        if matches or name in read:
            # Parameters come in order: one outside of all layers belongs to the layer before it.
            number = numbers[name] = matches[0] if matches else number
        else:
            numbers[name] = 0
    return numbers


def _timm_layer_numbers(
    module: nn.Module, net: nn.Module, read: Mapping[str, int]
) -> dict[str, int]:
    from timm.models import group_parameters

    groups = group_parameters(net, net.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    groups = cast("dict[str, int]", {f"net.{name}": number for name, number in groups.items()})
    ranks = {x: rank for rank, x in enumerate(sorted({groups[x] for x in groups.keys() & read}))}
    return {name: ranks.get(groups.get(name, 0), 0) for name, _ in module.named_parameters()}


def _transformer_blocks(module: nn.Module, read: Mapping[str, int]) -> list[str]:
    """Return a name for what precedes the blocks, then the blocks of the largest module list."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    largest = max(lists, key=lambda name: _size(name, read), default="")
    blocks = [f"{largest}.{key}" for key, _ in lists.get(largest, nn.Module()).named_children()]
    blocks = [name for name in blocks if _size(name, read)]
    return ["<before>", *blocks] if blocks else []


def _children(module: nn.Module, read: Mapping[str, int]) -> list[str]:
    """Return the children with weights; one with more than half of all is replaced by its own."""
    layers, half = [""], _size("", read) / 2
    while large := [
        i for i, x in enumerate(layers) if _size(x, read) > half and _parts(module, x, read)
    ]:
        layers[large[0] : large[0] + 1] = _parts(module, layers[large[0]], read)
    return [
        name for name in layers if any(p.ndim > 1 for p in module.get_submodule(name).parameters())
    ]


def _parts(module: nn.Module, name: str, read: Mapping[str, int]) -> list[str]:
    """Return the names of the children of a part that features depend on."""
    keys = (key for key, _ in module.get_submodule(name).named_children())
    return [part for key in keys if _size(part := f"{name}.{key}".lstrip("."), read)]


def _size(part: str, read: Mapping[str, int]) -> int:
    """Return the number of weights in a part of a module that features depend on."""
    return sum(size for name, size in read.items() if not part or name.startswith(f"{part}."))


def unread_parameters(encoder: Encoder) -> frozenset[str]:
    """Return the names of the parameters that no feature of a blank item depends on, in evaluation.

    Found in autograd's graph, of which no activation is kept and nothing is drawn at random.
    """
    processor = encoder.processor(False)
    device = next((x.device for x in (*encoder.parameters(), *encoder.buffers())), None)
    named = {name: p for name, p in encoder.named_parameters() if p.is_floating_point()}
    trained = {name for name, p in named.items() if p.requires_grad}
    drop = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))
    try:
        for parameter in named.values():
            parameter.requires_grad_(True)
        with torch.enable_grad(), evaluating(encoder), torch.random.fork_rng([]), drop:
            blank = processor.collate([processor.blank()])
            features = encoder({name: x.to(device) for name, x in blank.items()})
    finally:
        for name, parameter in named.items():
            parameter.requires_grad_(name in trained)
    reached, nodes = set(), [x.grad_fn for x in (features.tokens, features.pooled)]
    seen = set(nodes)
    while nodes:
        if (node := nodes.pop()) is None:
            continue
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        more = {x for x, _ in node.next_functions} - seen
        seen |= more
        nodes += more
    return frozenset(name for name, p in named.items() if id(p) not in reached)


def freeze(module: nn.Module, mode: str, name: str) -> list[nn.Module]:
    """Freeze a part of an encoder, and return the modules that must stay in evaluation mode.

    `all_but_last_<n>` leaves only the last n layers trainable; `norm` freezes the parameters and
    running statistics of the normalisation layers. `name` is the setting's name in errors.
    """
    last = re.fullmatch(r"all_but_last_([1-9]\d*)", mode)
    if mode == "norm":
        norm_layers = norms(module)
        if not norm_layers:
            raise FusionZooError(f"{name}={mode!r}: it has no normalisation layer")
        for layer in norm_layers:
            layer.requires_grad_(False)
        return norm_layers
    if last is None:
        raise FusionZooError(
            f"{name}={mode!r} is not one of {', '.join(MODES)}.{did_you_mean(mode, MODES)}"
        )
    numbers = layer_numbers(module)
    num_layers, num_trained = max(numbers.values(), default=-1) + 1, int(last[1])
    if num_trained >= num_layers:
        raise FusionZooError(
            f"{name}={mode!r}: the encoder has only {num_layers} layers; 'none' trains all of them"
        )
    for key, parameter in module.named_parameters():
        if numbers[key] < num_layers - num_trained:
            parameter.requires_grad_(False)
    return list(fully_frozen(module, {id(p) for p in module.parameters() if not p.requires_grad}))


def norms(module: nn.Module) -> list[nn.Module]:
    """Return the normalisation layers inside a module."""
    return [part for part in module.modules() if part is not module and is_norm(part)]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, by its class's name and parameters.

    Class names, because timm and Hugging Face define norms of their own.

    >>> [is_norm(x) for x in (nn.BatchNorm2d(1, affine=False), nn.Linear(1, 1))]
    [True, False]
    """
    vectors = all(p.ndim <= 1 for p in module.parameters())
    return vectors and "norm" in type(module).__name__.lower()


def fully_frozen(module: nn.Module, frozen: Set[int]) -> Iterator[nn.Module]:
    """Yield the largest submodules all of whose parameters are `frozen` (by `id`)."""
    parameters = {id(p) for p in module.parameters()}
    if parameters and parameters <= frozen:
        yield module
    elif parameters:
        for part in module.children():
            yield from fully_frozen(part, frozen)


def called_modules(module: nn.Module, run: Callable[[], object]) -> set[nn.Module]:
    """Return which of a module's parts, itself included, are called while `run` runs."""
    called: set[nn.Module] = set()
    hooks = [
        part.register_forward_pre_hook(lambda part, _: called.add(part))
        for part in module.modules()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return called


class Processor(ABC):
    """Turn decoded values into tensors, in the data loader's workers; picklable."""

    takes_batches = False  # whether `batch_items` is cheaper than `items` for each sample
    reads_together = False  # whether the values of a sample are one item: the frames of a clip

    @abstractmethod
    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        """Prepare one value; only augmentation draws from `generator` (None: no augmentation)."""

    def windows(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        """Prepare one value as several items, such as windows of a long clip; usually it is one."""
        return [self(value, generator)]

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        """Prepare the items of a sample: a list of values, or one value."""
        if not isinstance(value, list):
            return self.windows(value, generator)
        return [item for part in value for item in self.windows(part, generator)]

    def batch_items(
        self, values: Sequence[Any], generators: Sequence[torch.Generator | None]
    ) -> list[list[Item]]:
        """Prepare the items of several samples: those that `items` returns for each.

        A batch is prepared by one call if `takes_batches`. If that raises a `FusionZooError`,
        `items` is called for each sample, so that the error names one.
        """
        return [self.items(x, draws) for x, draws in zip(values, generators, strict=True)]

    def varies(self, value: Any) -> bool:
        """Return whether training may prepare `value` in another way than evaluation does.

        If no value varies, features of a frozen encoder may be cached (`--train.cache_frozen`).
        """
        return True

    def cuts(self, value: Any) -> bool:
        """Whether only a part of a value is read, for its length."""
        return False

    @abstractmethod
    def blank(self) -> Item:
        """Return the smallest valid item, a placeholder for samples that lack the modality."""

    def collate(self, items: Sequence[Item]) -> Item:
        """Stack items; where their first dimensions differ, pad with zeros at the end."""
        return {name: _batched([item[name] for item in items]) for name in items[0]}


def _batched(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if any(x.shape != first.shape for x in tensors):
        return pad_sequence(tensors, batch_first=True)
    return torch.stack(tensors)


def varies(processor: Processor, value: Any) -> bool:
    """Return whether training may prepare any item of a sample's value in another way."""
    values = value if isinstance(value, list) else [value]
    return any(processor.varies(part) for part in values)


class Augment(Protocol):
    """Adds random changes to a processor of training samples."""

    @property
    def note(self) -> str:
        """What it does, in a few words."""
        raise NotImplementedError

    def __call__(self, processor: Processor) -> Processor:
        """Return a processor that changes values at random before it prepares them."""
        raise NotImplementedError


class Encoder(nn.Module):
    """Turn one modality's batch into `Features`, independently of other modalities.

    `dim` is the width of tokens and of the pooled vector. `spec` holds the arguments of
    `create_encoder` that rebuild the encoder.
    """

    kind: str
    dim: int
    modality: str = ""
    spec: Mapping[str, Any] = {}
    checkpoint_settings: Mapping[str, Any] = {}  # read from files beside the weights, if any
    frozen: bool = False
    sharded: bool = False  # whether its weights are sharded over processes
    eval_modules: Sequence[nn.Module] = ()  # frozen parts, which stay in evaluation mode
    unread: frozenset[str] | None = None  # parameters that no feature depends on, once measured
    frozen_rows: int | None = None  # rows that a frozen encoder runs at once on a CPU; None: all
    augmentation: Augment | None = None  # of training samples (`augment.py`); None: none
    cut_by = ""  # the setting that says how much is read of a long value
    one_length = False  # whether all rows of a batch of an exported graph must have one length
    masks_spectrogram = False  # whether `encode` applies the input `masks` of augmentation
    like: Tensor  # empty; its dtype is that of what the encoder computes with

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0), persistent=False)

    @abstractmethod
    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        """Compute features of rows that all have the modality."""

    @abstractmethod
    def processor(self, train: bool) -> Processor:
        """Return the processor that prepares this encoder's inputs."""

    @property
    def reader(self) -> Encoder:
        """The encoder that says how values are prepared: one of its parts, if it is composed."""
        return self

    def loader_processor(self, train: bool) -> Processor:
        """Return the processor, for training with the run's augmentation."""
        processor = self.processor(train)
        if not train or self.augmentation is None:
            return processor
        return self.augmentation(processor)

    def forward(self, inputs: Mapping[str, Tensor]) -> Features:
        encode = self._encode_frozen if self.frozen else self.encode
        inputs = {
            name: x.to(self.like.dtype) if x.is_floating_point() else x
            for name, x in inputs.items()
        }
        return encode_items(encode, inputs) if ITEM_COUNTS in inputs else encode(inputs)

    @torch.no_grad()
    def _encode_frozen(self, inputs: Mapping[str, Tensor]) -> Features:
        """Encode `frozen_rows` rows at a time, which keeps the activations small.

        This changes no result, as the rows of a frozen encoder do not depend on each other.
        """
        first = next(iter(inputs.values()))
        rows = self.frozen_rows
        # With sharded weights, all processes must call the encoder equally often.
        if rows is None or len(first) <= rows or first.device.type != "cpu" or self.sharded:
            return self.encode(inputs)
        parts = [
            self.encode({name: x[start : start + rows] for name, x in inputs.items()})
            for start in range(0, len(first), rows)
        ]
        return Features(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def freeze(self, mode: str = "all") -> None:
        """Freeze parameters and running statistics: of `all`, or of a part, as `MODES` says."""
        if mode == "all":
            self.frozen = True
            self.requires_grad_(False)
            self.eval()
        elif mode != "none":
            self.eval_modules = freeze(self, mode, f"encoders.{self.modality}.freeze")

    def train(self, mode: bool = True) -> Encoder:
        if self.frozen and not self.training:
            return self  # every epoch, the walk over hundreds of modules would take longer than it
        super().train(mode and not self.frozen)
        for part in self.eval_modules:
            part.eval()
        return self

    @torch.no_grad()
    def measure(self) -> None:
        """Set `dim` by running a blank item; a model that cannot run it fails here."""
        self.eval()
        prepare = self.processor(False)
        self.dim = self.encode(prepare.collate([prepare.blank()])).tokens.shape[-1]
        self.train()

    def set_channels_last(self) -> None:
        """Store weights and buffers of four dimensions with channels last, in place.

        Convolutions over time have five, for which torch refuses the format.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.ndim == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    def save_assets(self, folder: Path) -> None:
        """Write files other than weights that rebuilding needs, such as a tokenizer; often none."""


@dataclass(frozen=True, kw_only=True)
class EncoderEntry(Entry[Encoder]):
    """Facts about one encoder, or about a library of them; its family is the kind it encodes."""

    takes_model: bool = False  # whether a model's name follows: `timm/resnet18`

    @property
    def prefix(self) -> str:
        """What stands before the model's name: `hf` of `hf-text`, which shares it with others."""
        return self.name.removesuffix(f"-{self.family}")

    @property
    def pattern(self) -> str:
        """How a list shows it: `timm/*` where a model's name follows, else its name."""
        return f"{self.prefix}/*" if self.takes_model else self.name


ENCODERS: Registry[Encoder, EncoderEntry] = Registry(
    "encoder", "fusionzoo zoo", EncoderEntry, KINDS, base=Encoder
)


def run_by_length(
    lengths: Tensor, run: Callable[..., Tensor | Sequence[Tensor]], *rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Run rows of equal length together, unpadded: (B, N, ...) -> (B, T, D), mask (B, T).

    For models whose output depends on padding, for instance by a group norm over time. An exported
    graph takes rows of one length only (`Encoder.one_length`), and reads no `lengths`.
    """
    if torch.compiler.is_exporting():
        output = run(*rows)
        assert isinstance(output, Tensor)
        return output, torch.ones(output.shape[:2], dtype=torch.bool, device=output.device)
    tokens: list[Tensor] = [torch.empty(0)] * len(lengths)
    for length in lengths.unique().tolist():
        group = (lengths == length).nonzero()[:, 0]
        outputs = run(*(x[group, :length] for x in rows))
        for row, output in zip(group.tolist(), outputs, strict=True):
            tokens[row] = output
    counts = torch.tensor([len(x) for x in tokens], device=lengths.device)
    padded = pad_sequence(tokens, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=lengths.device) < counts[:, None]


@torch.no_grad()
def initialise(module: nn.Module, scheme: str = "default", **settings: Any) -> nn.Module:
    """Initialise `module` in place and return it.

    `scheme` is `default`, which changes nothing, or sets the weights of linear and convolution
    layers: xavier_* (Glorot & Bengio 2010), kaiming_* (He et al. 2015), orthogonal (Saxe et al.
    2014), trunc_normal and normal (std 0.02), constant (0). It also sets biases to 0, norms to
    weight 1 and bias 0, and draws embeddings from a normal distribution with std 0.02. `settings`
    go to the scheme, e.g. `std=0.01`, `gain=2.0`, `val=0.1`.

    >>> layer = initialise(nn.Linear(2, 2), "constant", val=0.5)
    >>> layer.weight.tolist(), layer.bias.tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [0.0, 0.0])
    """
    if scheme == "default":
        return module
    check_known(scheme, ["default", *SCHEMES], f"unknown init {scheme!r}", "There are")
    for layer in module.modules():
        if isinstance(layer, WEIGHTED):
            SCHEMES[scheme](layer.weight, **settings)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, NORMS) and layer.weight is not None:
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
        elif isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
            SCHEMES[scheme](layer.in_proj_weight, **settings)
            nn.init.zeros_(layer.in_proj_bias)
    return module


class TokenTransformer(nn.Module):
    """Pre-norm transformer over embedded tokens, with learned positions; pooled is the mean.

    Shapes: x (B, T, D), mask (B, T) with at least one real token per row -> Features
    """

    def __init__(
        self, dim: int, num_layers: int, num_heads: int, dropout: float, max_length: int
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.positions = nn.Parameter(torch.randn(max_length, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(
            dim, num_heads, 4 * dim, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(dim), enable_nested_tensor=False
        )

    def forward(self, x: Tensor, mask: Tensor) -> Features:
        x = x + self.positions[: x.shape[1]]
        return mean_pooled(self.layers(x, src_key_padding_mask=~mask), mask)
