"""The contract of fusions: masks, missing modalities, gradients, numerics, learning."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.machine.graphs import (
    TOLERANCE,
    difference,
    export_program,
    has_onnx,
    onnx_bytes,
    open_session,
    quiet,
    run_session,
)
from fusionzoo.structures import Features, FusionOutput, StepContext

from .checks import Checks, assert_registered, find

Maker = Callable[..., Fusion]  # (dims, dim, num_outputs) -> Fusion
Inputs = dict[str, Features]
DIMS = {"image": 5, "text": 7, "audio": 3, "depth": 4, "table": 6}
DIM, OUTPUTS = 8, 4
CHECKS: Checks[Maker] = Checks()
WIDTHS = {"left": 8, "right": 6, "noise": 8}
CLASS_SHARES = (0.4, 0.2, 0.2, 0.2)
NUM_TRAIN, NUM_TEST, TRAINED_DIM = 128, 500, 16
BATCH, EPOCHS = 64, 30
RATES = (0.0, 0.3, 0.6, 0.9)  # of missing values
SLACK = 0.02  # of accuracy
SPREAD = 1.5  # of the centres of classes, in standard deviations of a sample around its centre
EXPORTED = {"image": 48, "text": 40, "audio": 32}  # wide enough that no sketch is mostly empty


def build(
    make: Maker, modalities: int = 3, *, dtype: torch.dtype = torch.float64, outputs: int = OUTPUTS
) -> Fusion:
    """Build a fusion of the first few modalities, every parameter away from its initial value."""
    torch.manual_seed(0)
    fusion = make(dict(itertools.islice(DIMS.items(), modalities)), DIM, outputs)
    with torch.no_grad():
        for parameter in fusion.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return fusion.to(dtype).eval()


def features(
    presence: Tensor,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
    dims: Mapping[str, int] = DIMS,
) -> Inputs:
    """Make features of different lengths with padding, absent where `presence` (B, M) is False."""
    draw = torch.Generator().manual_seed(seed)
    by_modality = {}
    for column, (name, width) in enumerate(itertools.islice(dims.items(), presence.shape[1])):
        rows, length = len(presence), 3 + column
        tokens = torch.randn(rows, length, width, generator=draw).to(dtype)
        counts = torch.randint(2, length + 1, (rows,), generator=draw)
        mask = (torch.arange(length) < counts[:, None]) & presence[:, column, None]
        pooled = torch.randn(rows, width, generator=draw).to(dtype)
        by_modality[name] = Features(tokens, mask, pooled)
    return by_modality


def patterns(modalities: int) -> Tensor:
    """Return presence for every subset of modalities, from all to none: (2^M, M)."""
    return torch.tensor(list(itertools.product([True, False], repeat=modalities)))


def full(rows: int, modalities: int = 3) -> Tensor:
    """Return presence of all modalities in all rows: (rows, M)."""
    return torch.ones(rows, modalities, dtype=torch.bool)


def new(make: Maker, modalities: int = 3) -> Fusion:
    """Build a fusion of the first few modalities as it is, in float64 and evaluation mode."""
    return make(dict(itertools.islice(DIMS.items(), modalities)), DIM, OUTPUTS).double().eval()


def lengthened(inputs: Mapping[str, Features]) -> Inputs:
    """Append three padded tokens to each modality."""
    return {
        name: Features(F.pad(x.tokens, (0, 0, 0, 3), value=7.0), F.pad(x.mask, (0, 3)), x.pooled)
        for name, x in inputs.items()
    }


def poison(inputs: Mapping[str, Features], value: float) -> Inputs:
    """Overwrite padded tokens, and the pooled vectors of rows without the modality."""
    return {
        name: Features(
            torch.where(x.mask[..., None], x.tokens, value),
            x.mask,
            torch.where(x.mask.any(1)[:, None], x.pooled, value),
        )
        for name, x in inputs.items()
    }


def tensors_of(output: FusionOutput) -> dict[str, Tensor]:
    """Return an output's tensors by name."""
    tensors = {"embedding": output.embedding, "logits": output.logits}
    tensors |= {f"unimodal[{name}]": x for name, x in output.unimodal.items()}
    return tensors if output.weights is None else {**tensors, "weights": output.weights}


def assert_equal(
    output: FusionOutput, expected: FusionOutput, why: str, tolerance: float = 1e-10
) -> None:
    """Require equal outputs, to the bit where `tolerance` is 0."""
    tensors, wanted = tensors_of(output), tensors_of(expected)
    assert tensors.keys() == wanted.keys(), f"{why}: outputs {list(wanted)} became {list(tensors)}"
    for name, x in tensors.items():
        if not torch.allclose(x, wanted[name], rtol=tolerance, atol=tolerance, equal_nan=True):
            row = (x != wanted[name]).flatten(1).any(1).nonzero()[0, 0].item()
            off = (x - wanted[name]).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}, first in row {row}")


def assert_finite_gradients(fusion: Fusion, when: str) -> None:
    for name, parameter in fusion.named_parameters():
        finite = parameter.grad is None or torch.isfinite(parameter.grad).all()
        assert finite, f"the gradient of {name} is not finite {when}"


def rows_of(inputs: Mapping[str, Features], rows: Any) -> Inputs:
    """Return some rows."""
    return {name: Features(*(x[rows] for x in features)) for name, features in inputs.items()}


def loss_of(output: FusionOutput) -> Tensor:
    """Return a number that depends on every output."""
    return torch.stack([x.square().sum() for x in tensors_of(output).values()]).sum()


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row."""
    return F.cross_entropy(logits, target, reduction="none")


def own_loss(fusion: Fusion, output: FusionOutput, phase: int = 0) -> Tensor:
    """Return the fusion's own loss of each row, (B,), as training computes it."""
    rows = torch.arange(len(output.logits))
    target = rows % output.logits.shape[1]
    memory = fusion.prepare(target)
    context = StepContext(rows=rows, epoch=1.5, phase=phase, criterion=entropy, memory=memory)
    return fusion.loss(output, target, context)


def counts_for(make: Maker) -> list[int]:
    """Return the numbers of modalities that the fusion accepts, of 1, 2, 3 and 5."""
    cls = getattr(make, "func", make)  # of a `partial` with settings
    entry = next((FUSIONS[name] for name in FUSIONS if FUSIONS[name].cls is cls), None)
    least = entry.at_least if entry is not None else getattr(cls, "at_least", 1)
    return [n for n in (1, 2, 3, 5) if n >= least]


def maker(target: str, settings: Mapping[str, Any] | None = None) -> Maker:
    """Return what builds the fusion of a name, `module:Class` or `file.py:Class`."""
    cls: Maker = find(target, FUSIONS)
    return partial(FUSIONS.create, target, **settings) if settings else cls


@CHECKS.add
def weights_are_shares_of_what_is_present(make: Maker) -> None:
    """Tried: every subset of three modalities; weights at least 0, 0 where absent, summing to 1."""
    out = build(make)(features(patterns(3)))
    if out.weights is None:
        return
    absent = ~patterns(3)
    assert (out.weights[absent] == 0).all(), "an absent modality has weight"
    assert (out.weights >= 0).all(), "a weight is negative"
    sums = out.weights.sum(1)[:-1]
    torch.testing.assert_close(sums, torch.ones_like(sums))


@CHECKS.add
def the_content_of_a_missing_modality_changes_nothing(make: Maker) -> None:
    """Tried: NaN, infinity and 1e30 in everything that is absent or padding; equal to the bit."""
    fusion, inputs = build(make), features(patterns(3))
    expected = fusion(poison(inputs, 0.0))
    for value in (float("nan"), float("inf"), 1e30):
        why = f"absent content set to {value}"
        assert_equal(fusion(poison(inputs, value)), expected, why, tolerance=0)


@CHECKS.add
def every_subset_of_modalities_gives_finite_outputs(make: Maker) -> None:
    """Tried: all 2^M subsets of 1, 2, 3 and 5 modalities, the empty one included."""
    for modalities in counts_for(make):
        out = build(make, modalities)(features(patterns(modalities)))
        for name, x in tensors_of(out).items():
            bad = (~torch.isfinite(x)).any(-1).nonzero()[:, 0].tolist()
            subset = patterns(modalities)[bad[:1]].tolist()
            assert not bad, f"{name} is not finite for presence {subset}"


@CHECKS.add
def padding_changes_nothing(make: Maker) -> None:
    """Tried: 1e6 in padded tokens, and three more padded tokens at the end."""
    fusion, inputs = build(make), features(full(4))
    expected = fusion(inputs)
    assert_equal(fusion(poison(inputs, 1e6)), expected, "padded tokens set to 1e6")
    assert_equal(fusion(lengthened(inputs)), expected, "three padded tokens appended")


@CHECKS.add
def batch_mates_change_nothing(make: Maker) -> None:
    """Tried: every subset of three modalities in one batch, and each row alone."""
    fusion, inputs = build(make), features(patterns(3))
    together = fusion(inputs)
    for row, presence in enumerate(patterns(3).tolist()):
        alone = fusion(rows_of(inputs, slice(row, row + 1)))
        part = {n: x[row : row + 1] for n, x in tensors_of(together).items()}
        for name, x in tensors_of(alone).items():
            message = f"{name} of a sample with presence {presence} depends on its batch"
            torch.testing.assert_close(x, part[name], rtol=1e-10, atol=1e-10, msg=message)


@CHECKS.add
def every_present_modality_matters(make: Maker) -> None:
    """Tried: adding 1 to the first feature of one modality at a time, in 16 rows.

    A fusion may answer some rows without it, if it chooses what to read.
    """
    fusion, inputs = build(make), features(full(16))
    expected = fusion(inputs).logits
    for name, x in inputs.items():
        step = (torch.arange(x.pooled.shape[1]) == 0).to(x.pooled.dtype)  # a norm hides a constant
        other = Features(x.tokens + step, x.mask, x.pooled + step)
        changed = fusion({**inputs, name: other}).logits
        assert not torch.allclose(changed, expected), f"the logits do not depend on {name}"


@CHECKS.add
def the_order_of_the_dict_does_not_matter(make: Maker) -> None:
    """Tried: the same features in a dict of reversed order."""
    fusion, inputs = build(make), features(patterns(3))
    shuffled = dict(reversed(inputs.items()))
    assert_equal(fusion(shuffled), fusion(inputs), "modalities in another order", tolerance=0)


@CHECKS.add
def the_order_of_its_modalities_does_not_matter(make: Maker) -> None:
    """Tried: building it for the reversed order with the same weights, if it says `symmetric`."""
    fusion, inputs = build(make), features(patterns(3))
    if not fusion.symmetric:
        return
    other = make(dict(reversed(fusion.dims.items())), DIM, OUTPUTS).double().eval()
    other.load_state_dict(fusion.state_dict())
    first, second = fusion(inputs), other(inputs)
    if second.weights is not None:
        second = second._replace(weights=second.weights.flip(1))
    assert_equal(second, first, "built for its modalities in reversed order")


class Split(NamedTuple):
    """Vectors by modality, (B, D) each, and classes, (B,)."""

    vectors: dict[str, Tensor]
    target: Tensor


class TrainedFusion(NamedTuple):
    """A fusion in evaluation mode, with the training and test samples."""

    fusion: Fusion
    train: Split
    test: Split


def an_uninformative_modality_can_be_dropped(make: Maker) -> None:
    """Tried: noise, dropped or set to its training mean; at most 2 points (and 2 s.e.) worse."""
    fusion, train, test = trained(make)
    mean = train.vectors["noise"].mean(0).expand(NUM_TEST, -1)
    averaged = correct(fusion, test._replace(vectors={**test.vectors, "noise": mean}))
    dropped = correct(fusion, test, absent=("noise",))
    drop = averaged - dropped  # of each sample: 1, 0 or -1
    assert drop.mean() <= SLACK + 2 * drop.std() / sqrt(NUM_TEST), (
        f"accuracy {dropped.mean():.3f} without a modality of noise, {averaged.mean():.3f} with its"
        " training mean in its place: give an absent modality that mean (RunningMeans)"
    )


def missing_modalities_never_cost_more_than_all_knowledge(make: Maker) -> None:
    """Tried: 0 to 90 % of the test values missing; at least the majority class, less 3 s.e."""
    fusion, _, test = trained(make)
    majority = test.target.bincount().max().item() / NUM_TEST
    lowest = majority - 3 * sqrt(majority * (1 - majority) / NUM_TEST)
    by_subset = {
        names: correct(fusion, test, [m for m in WIDTHS if m not in names]).mean().item()
        for count in range(1, len(WIDTHS) + 1)
        for names in itertools.combinations(WIDTHS, count)
    }
    for rate in RATES:
        accuracy = _expected(by_subset, rate)
        assert accuracy >= lowest, (
            f"accuracy {accuracy:.3f} with {rate:.0%} of the values missing;"
            f" the majority class alone gives {majority:.3f}"
        )


def _expected(by_subset: Mapping[tuple[str, ...], float], rate: float) -> float:
    """Return the mean accuracy if each modality is missing at `rate`, but never all of them."""
    chances = {
        names: (1 - rate) ** len(names) * rate ** (len(WIDTHS) - len(names)) for names in by_subset
    }
    total = sum(chance * by_subset[names] for names, chance in chances.items())
    return total / sum(chances.values())


@lru_cache(maxsize=1)  # both checks use the same fusion
def trained(make: Maker) -> TrainedFusion:
    """Train all phases, `EPOCHS` epochs each."""
    draw = torch.Generator().manual_seed(0)
    centres = {m: torch.randn(len(CLASS_SHARES), w, generator=draw) for m, w in WIDTHS.items()}
    train, test = (_draw(count, centres, draw) for count in (NUM_TRAIN, NUM_TEST))
    torch.manual_seed(0)
    fusion = make(WIDTHS, TRAINED_DIM, len(CLASS_SHARES)).float().train()
    memory = fusion.prepare(train.target)
    for number, phase in enumerate(fusion.phases):
        learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
        optimizer = torch.optim.Adam(learning, lr=1e-2)
        for epoch in range(EPOCHS):
            for rows in torch.randperm(NUM_TRAIN, generator=draw).split(BATCH):
                hidden = torch.rand(BATCH, len(WIDTHS), generator=draw) < 1 / 3
                batch = Split({m: x[rows] for m, x in train.vectors.items()}, train.target[rows])
                features = _features(batch, ~(hidden & fusion.learns_absence))
                context = StepContext(
                    rows=rows, epoch=float(epoch), phase=number, criterion=entropy, memory=memory
                )
                optimizer.zero_grad()
                fusion.loss(fusion(features), train.target[rows], context).mean().backward()
                optimizer.step()
    return TrainedFusion(fusion.eval(), train, test)


@torch.no_grad()
def correct(fusion: Fusion, split: Split, absent: Sequence[str] = ()) -> Tensor:
    """Return whether each sample is classified correctly without some modalities, 1 or 0: (B,)."""
    present = torch.tensor([m not in absent for m in WIDTHS]).expand(len(split.target), -1)
    return (fusion(_features(split, present)).logits.argmax(-1) == split.target).double()


def _draw(count: int, centres: Mapping[str, Tensor], draw: torch.Generator) -> Split:
    """Draw classes of unequal shares, and vectors around 1 + the class's centre (noise: 1)."""
    target = torch.multinomial(torch.tensor(CLASS_SHARES), count, True, generator=draw)
    vectors = {
        m: 1.0
        + (0.0 if m == "noise" else SPREAD) * centre[target]
        + torch.randn(count, centre.shape[1], generator=draw)
        for m, centre in centres.items()
    }
    return Split(vectors, target)


def _features(split: Split, present: Tensor) -> dict[str, Features]:
    """Make features of one token each; `present` is (B, M)."""
    return {
        m: Features(x[:, None], present[:, column, None], x)
        for column, (m, x) in enumerate(split.vectors.items())
    }


@CHECKS.add
def shapes_and_dtypes_are_those_of_a_fusion_output(make: Maker) -> None:
    """Tried: 1, 2, 3 and 5 modalities of different widths and lengths; 0, 1 and 4 rows; float32."""
    for modalities in counts_for(make):
        fusion = build(make, modalities, dtype=torch.float32)
        for rows in (0, 1, 4):
            out = fusion(features(full(rows, modalities), dtype=torch.float32))
            where = f"{modalities} modalities, {rows} rows"
            assert isinstance(out, FusionOutput), f"{where}: returned {type(out).__name__}"
            assert out.embedding.shape == (rows, DIM), f"{where}: embedding {out.embedding.shape}"
            assert out.logits.shape == (rows, OUTPUTS), f"{where}: logits {out.logits.shape}"
            assert set(out.unimodal) <= set(DIMS), f"{where}: unimodal {set(out.unimodal)}"
            for name, x in tensors_of(out).items():
                assert x.dtype == torch.float32, f"{where}: {name} is {x.dtype}"
                assert torch.isfinite(x).all(), f"{where}: {name} is not finite"


@CHECKS.add
def it_compiles_whole(make: Maker) -> None:
    """Tried: torch.compile(fullgraph=True), two modalities, float32, to 1e-5."""
    fusion = build(make, 2, dtype=torch.float32)
    inputs = features(full(4, 2), dtype=torch.float32)
    compiled = torch.compile(fusion, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(inputs), fusion(inputs), "torch.compile", tolerance=1e-5)


@CHECKS.add
def it_exports_with_free_sizes(make: Maker) -> None:
    """Tried: torch.export, and ONNX where the extra `onnx` is installed, with free numbers of rows
    and tokens: 1, 5 and 8 rows, every subset of three modalities, other lengths; to 1e-4."""
    for runtime, case, off in export_differences(make):
        assert off <= TOLERANCE, f"{runtime}, {case}: the outputs differ by {off:.2g}"


def export_differences(make: Maker) -> Iterator[tuple[str, str, float]]:
    """Yield runtime, case and by how much a graph differs from the fusion there, over
    max(1, the largest value)."""
    torch.manual_seed(0)
    fusion = make(EXPORTED, 16, OUTPUTS).float().eval()
    program = export_program(*_traced(fusion))
    with quiet():
        exported = program.module()
    cases = _other_sizes()
    with torch.no_grad():
        expected = {case: list(tensors_of(fusion(x)).values()) for case, x in cases.items()}
        for case, x in cases.items():
            yield "torch.export", case, difference(exported(_plain(x)), expected[case])
        names = list(tensors_of(fusion(cases["one row"])))
    if not has_onnx():
        return
    inputs = [*_by_name(cases["one row"])]
    session = open_session(onnx_bytes(program, inputs, names, optimise=False), threads=1)
    for case, x in cases.items():
        yield "ONNX", case, difference(run_session(session, _by_name(x)), expected[case])


class _Outputs(torch.nn.Module):
    """A fusion between plain tuples of tensors."""

    def __init__(self, fusion: Fusion) -> None:
        super().__init__()
        self.fusion = fusion

    def forward(self, inputs: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        output = self.fusion({name: Features(*x) for name, x in inputs.items()})
        return list(tensors_of(output).values())


def _traced(fusion: Fusion) -> tuple[torch.nn.Module, tuple[Any, ...], tuple[Any, ...]]:
    """Return a module, its inputs and the names of their free sizes."""
    batch = Dim("batch", min=1)
    shapes = {}
    for name in EXPORTED:
        tokens = {0: batch, 1: Dim(f"{name}_tokens", min=1)}
        shapes[name] = (tokens, tokens, {0: batch})
    inputs = features(full(4), dtype=torch.float32, dims=EXPORTED)
    return _Outputs(fusion).eval(), (_plain(inputs),), (shapes,)


def _plain(inputs: Mapping[str, Features]) -> dict[str, tuple[Tensor, ...]]:
    return {name: tuple(x) for name, x in inputs.items()}


def _by_name(inputs: Mapping[str, Features]) -> dict[str, Tensor]:
    return {f"{m}.{name}": x for m, one in inputs.items() for name, x in one._asdict().items()}


def _other_sizes() -> dict[str, Inputs]:
    """Return features of other numbers of rows and tokens than those that were traced."""
    subsets = features(patterns(3), seed=2, dtype=torch.float32, dims=EXPORTED)
    longer = lengthened(rows_of(subsets, slice(0, 5)))
    shortest = {n: Features(x.tokens[:, :1], x.mask[:, :1], x.pooled) for n, x in subsets.items()}
    one_row = rows_of(subsets, slice(1, 2))
    cases = {"every subset": subsets, "one row": one_row, "five rows, three more tokens": longer}
    return {**cases, "one token": shortest}


@CHECKS.add
def bfloat16_autocast_is_finite_and_near(make: Maker) -> None:
    """Tried: bfloat16 autocast, every subset; finite, and within 10 % of the largest value."""
    fusion = build(make, dtype=torch.float32)
    inputs = features(patterns(3), dtype=torch.float32)
    expected = fusion(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fusion(poison(inputs, float("nan")))
    for name, x in tensors_of(output).items():
        assert torch.isfinite(x).all(), f"{name} is not finite under bfloat16"
        wanted = tensors_of(expected)[name]
        off = (x.float() - wanted).abs().max() / wanted.abs().max()
        assert off < 0.1, f"{name} is {off:.0%} off under bfloat16"


@CHECKS.add
def a_state_dict_restores_it_exactly(make: Maker) -> None:
    """Tried: saving the state dict, loading it into a second one; equal to the bit."""
    fusion = build(make)
    other = new(make)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save(fusion.state_dict(), path)
        other.load_state_dict(torch.load(path, weights_only=True))
    inputs = features(patterns(3))
    assert_equal(other(inputs), fusion(inputs), "after a state dict round trip", tolerance=0)


@CHECKS.add
def the_same_seed_builds_the_same_fusion(make: Maker) -> None:
    """Tried: building it twice under one seed."""
    first, second = (build(make).state_dict() for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), f"{name} differs between two builds with one seed"


@CHECKS.add
def large_features_give_finite_outputs(make: Maker) -> None:
    """Tried: features times 1e4, two classes, in float32 and under bfloat16 autocast."""
    fusion = build(make, dtype=torch.float32, outputs=2)
    inputs = features(full(64), dtype=torch.float32)
    large = {n: Features(1e4 * x.tokens, x.mask, 1e4 * x.pooled) for n, x in inputs.items()}
    for low in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            output = fusion(large)
            loss = own_loss(fusion, output).sum()
        kind = "bfloat16" if low else "float32"
        for name, x in tensors_of(output).items():
            assert torch.isfinite(x).all(), f"{name} is not finite for features of 1e4 in {kind}"
        fusion.zero_grad()
        loss.backward()
        assert_finite_gradients(fusion, f"for features of 1e4 in {kind}")


@CHECKS.add
def gradients_stay_finite_and_do_not_reach_what_is_absent(make: Maker) -> None:
    """Tried: NaN in everything absent, every subset, backward through all outputs."""
    fusion = build(make)
    inputs = poison(features(patterns(3)), float("nan"))
    for x in inputs.values():
        x.tokens.requires_grad_(), x.pooled.requires_grad_()
    loss_of(fusion(inputs)).backward()
    assert_finite_gradients(fusion, "when a modality is absent")
    for name, x in inputs.items():
        for tensor, absent in ((x.tokens, ~x.mask), (x.pooled, ~x.mask.any(1))):
            if tensor.grad is not None:
                assert (tensor.grad[absent] == 0).all(), f"a gradient reaches absent {name}"


@CHECKS.add
def every_parameter_is_registered_and_gets_a_gradient(make: Maker) -> None:
    """Tried: backward through outputs and own loss, in every phase; loose tensors searched for."""
    fusion = build(make)
    assert_registered(fusion)
    inputs = features(patterns(3))
    for phase in range(len(fusion.phases)):
        output = fusion(inputs)
        (loss_of(output) + own_loss(fusion, output, phase).sum()).backward()
    for name, parameter in fusion.named_parameters():
        learns = parameter.grad is not None and bool((parameter.grad != 0).any())
        null = "pass the embedding through self.or_null(...)"
        use = null if name == "null" else "use or remove it"
        assert learns, f"{name} gets no gradient: {use}"


@CHECKS.add
def its_loss_is_finite_whatever_is_missing(make: Maker) -> None:
    """Tried: its own loss in training mode, every phase, every subset, NaN where absent."""
    fusion = build(make).train()
    for phase in range(len(fusion.phases)):
        inputs = poison(features(patterns(3)), float("nan"))
        torch.manual_seed(0)
        loss = own_loss(fusion, fusion(inputs), phase)
        assert loss.shape == (8,), f"the loss has shape {tuple(loss.shape)}; one per row is (8,)"
        bad = (~torch.isfinite(loss)).nonzero()[:, 0].tolist()
        assert not bad, f"the loss is not finite for presence {patterns(3)[bad[:1]].tolist()}"
        fusion.zero_grad()
        loss.sum().backward()
        assert_finite_gradients(fusion, "in training")
        assert own_loss(fusion, fusion(features(full(0))), phase).shape == (0,), "fails on no rows"


@CHECKS.add
def its_phases_train_every_parameter(make: Maker) -> None:
    """Tried: the prefixes of all phases against the parameters' names."""
    fusion = build(make)
    assert abs(sum(phase.share for phase in fusion.phases) - 1) < 1e-9, "shares do not sum to 1"
    for phase in fusion.phases:
        for prefix in phase.trains:
            known = any(name.startswith(prefix) for name, _ in fusion.named_parameters())
            assert known, f"phase {phase.name!r} trains {prefix!r}, and nothing is called so"
    prefixes = tuple(prefix for phase in fusion.phases for prefix in phase.trains)
    for name, _ in fusion.named_parameters():
        assert name.startswith(prefixes), f"no phase trains {name}"


@CHECKS.add
def a_linear_skip_starts_as_a_linear_model_and_learns(make: Maker) -> None:
    """Tried: `linear_skip` on a new fusion, alone with each modality; two steps of each phase.

    A fusion without a layer that could start at zero refuses the option.
    """
    torch.manual_seed(0)
    fusion = new(make)
    try:
        skip = (fusion if fusion.linear_skip is not None else fusion.add_linear_skip()).linear_skip
    except FusionZooError:
        return
    assert skip is not None
    for weights in skip.double().parameters():
        assert (weights == 0).all(), "its linear layers do not start at zero"
        torch.nn.init.normal_(weights)
    alone = features(torch.eye(3, dtype=torch.bool))
    linear = fusion.linear_logits(alone)
    assert linear is not None
    classes = linear.sum(1)[:, :OUTPUTS].argmax(1)  # the first of several versions
    if linear.shape[-1] == OUTPUTS:
        assert torch.equal(fusion(alone).logits.argmax(1), classes), "it starts as another model"
    inputs, moved = features(full(8)), set[str]()
    for _ in range(2):
        for number, phase in enumerate(fusion.phases):
            fusion.zero_grad()
            own_loss(fusion.train(), fusion(inputs), number).mean().backward()
            for name, parameter in fusion.named_parameters():
                gradient = parameter.grad
                if name.startswith(phase.trains) and gradient is not None and gradient.any():
                    moved.add(name)
                    parameter.data -= 0.1 * gradient
    for name in skip:
        assert f"linear_skip.{name}.weight" in moved, f"no loss trains the linear layer of {name}"
    others = ("linear_skip.", *fusion.last_layers, "null", "prior_logits")
    own = {name for name, _ in fusion.named_parameters() if not name.startswith(others)}
    assert not own or moved & own, "its own layers never learn"


@CHECKS.add
def the_mean_with_a_linear_model_is_exact(make: Maker) -> None:
    """Tried: `average_with` of random weights, modalities missing, where the fusion `ends_linear`.

    Training joins the two so by default, where the encoders are frozen.
    """
    fusion = build(make)
    if not fusion.ends_linear:
        return
    inputs = features(full(4))
    inputs["image"] = inputs["image"]._replace(mask=inputs["image"].mask & False)
    weights = {name: torch.randn(OUTPUTS, width).double() for name, width in fusion.dims.items()}
    bias, pooled = torch.randn(OUTPUTS).double(), fusion.pooled(inputs)
    linear = bias + sum(pooled[name] @ weight.T for name, weight in weights.items())
    wanted = (fusion(inputs).logits + linear) / 2
    fusion.average_with(weights, bias)
    assert torch.allclose(fusion(inputs).logits, wanted), "its logits are not those of one layer"


@CHECKS.add
def gradients_are_the_derivatives(make: Maker) -> None:
    """Tried: torch.autograd.gradcheck on embedding and logits, two modalities."""
    fusion = build(make, 2)
    inputs = features(full(2, 2))
    leaves = [t.clone().requires_grad_() for x in inputs.values() for t in (x.tokens, x.pooled)]

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        of_leaves = {
            name: Features(tokens, x.mask, pooled)
            for (name, x), (tokens, pooled) in zip(inputs.items(), pairs, strict=True)
        }
        output = fusion(of_leaves)
        return output.embedding, output.logits

    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


@CHECKS.add
def one_modality_alone_is_enough_to_learn(make: Maker) -> None:
    """Tried: 150 steps per phase on two noisy bits, of which the first is the target."""
    reached = accuracy(make, "unique")
    assert reached > 0.95, f"reaches {reached:.2f} on one modality's bit"


def accuracy(make: Maker, task: str, steps: int = 150) -> float:
    """Train on two noisy bits, one per modality; return the accuracy on fresh samples.

    `unique`: the target is the first bit. `xor`: whether the bits differ, which neither alone
    predicts, so a sum of unimodal logits stays at chance. Every phase gets `steps` steps; the last
    one ends early once the accuracy is 1.
    """
    torch.manual_seed(0)
    fusion = make({"a": 4, "b": 4}, 16, 2).float().train()
    rows, target = torch.arange(128), torch.zeros(128, dtype=torch.int64)
    memory = fusion.prepare(target)
    for number, phase in enumerate(fusion.phases):
        learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
        optimizer = torch.optim.Adam(learning, lr=1e-2)
        for step in range(steps):
            inputs, target = _bits(task, 128)
            context = StepContext(
                rows=rows, epoch=step / 10, phase=number, criterion=entropy, memory=memory
            )
            loss = fusion.loss(fusion(inputs), target, context).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = number == len(fusion.phases) - 1
            if last and step % 20 == 19 and _accuracy(fusion, task) == 1:
                break
    return _accuracy(fusion, task)


@torch.no_grad()
def _accuracy(fusion: Fusion, task: str) -> float:
    inputs, target = _bits(task, 1000)
    right = fusion.eval()(inputs).logits.argmax(-1) == target
    fusion.train()
    return right.double().mean().item()


def _bits(task: str, rows: int) -> tuple[Inputs, Tensor]:
    bits = torch.randint(0, 2, (rows, 2))
    inputs = {}
    for column, name in enumerate(("a", "b")):
        signal = (2.0 * bits[:, column, None] - 1) * torch.tensor([1.0, -1.0, 0.5, 0.0])
        pooled = signal + 0.1 * torch.randn(rows, 4)
        inputs[name] = Features(pooled[:, None], torch.ones(rows, 1, dtype=torch.bool), pooled)
    return inputs, bits[:, 0] if task == "unique" else (bits[:, 0] != bits[:, 1]).long()


CHECKS.add(an_uninformative_modality_can_be_dropped)
CHECKS.add(missing_modalities_never_cost_more_than_all_knowledge)
