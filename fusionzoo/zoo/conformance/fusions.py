"""The contract that every fusion keeps, as checks that anyone can run: `fusionzoo zoo check
m:MyFusion`.

Each check builds the fusion, tries inputs that commonly break one, and raises `AssertionError` with
the smallest input that fails. All run on the CPU in float64 and evaluation mode unless they say
otherwise.

Shapes: `B` batch, `M` modalities, `T` tokens, `D` width.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.fusion import FUSIONS, Fusion
from fusionzoo.structures import Features, FusionOutput, StepContext

from . import absence

Maker = Callable[..., Fusion]  # (dims, dim, num_outputs) -> Fusion
Given = dict[str, Features]
DIMS = {"image": 5, "text": 7, "audio": 3, "depth": 4, "table": 6}
DIM, OUTPUTS = 8, 4
CHECKS: dict[str, Callable[[Maker], None]] = {}


def check(function: Callable[[Maker], None]) -> Callable[[Maker], None]:
    """Add a check; its name is what it holds."""
    CHECKS[function.__name__] = function
    return function


# ---- what the checks are made of


def build(
    make: Maker,
    modalities: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    outputs: int = OUTPUTS,
) -> Fusion:
    """Build a fusion of the first few modalities, every parameter away from its initial value."""
    torch.manual_seed(0)
    fusion = make(dict(itertools.islice(DIMS.items(), modalities)), DIM, outputs)
    with torch.no_grad():
        for parameter in fusion.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return fusion.to(dtype).eval()


def features(presence: Tensor, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Given:
    """Make features of different lengths with padding, absent where `presence` (B, M) is False."""
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for column, (name, width) in enumerate(itertools.islice(DIMS.items(), presence.shape[1])):
        rows, length = len(presence), 3 + column
        tokens = torch.randn(rows, length, width, generator=draw).to(dtype)
        counts = torch.randint(2, length + 1, (rows,), generator=draw)
        mask = (torch.arange(length) < counts[:, None]) & presence[:, column, None]
        pooled = torch.randn(rows, width, generator=draw).to(dtype)
        made[name] = Features(tokens, mask, pooled)
    return made


def patterns(modalities: int) -> Tensor:
    """Return every subset of modalities, all of them first, none last: (2^M, M)."""
    rows = itertools.product([True, False], repeat=modalities)
    return torch.tensor(list(rows))


def full(rows: int, modalities: int = 3) -> Tensor:
    """Return that everything is there."""
    return torch.ones(rows, modalities, dtype=torch.bool)


def poison(given: Mapping[str, Features], value: float) -> Given:
    """Overwrite all that carries nothing: padded tokens, and pooled vectors of absent rows."""
    return {
        name: Features(
            torch.where(x.mask[..., None], x.tokens, value),
            x.mask,
            torch.where(x.mask.any(1)[:, None], x.pooled, value),
        )
        for name, x in given.items()
    }


def named(output: FusionOutput) -> dict[str, Tensor]:
    """Return an output's tensors by name."""
    found = {"embedding": output.embedding, "logits": output.logits}
    found |= {f"unimodal[{name}]": x for name, x in output.unimodal.items()}
    return found if output.weights is None else {**found, "weights": output.weights}


def same(found: FusionOutput, wanted: FusionOutput, why: str, tolerance: float = 1e-10) -> None:
    """Require equal outputs, to the bit where `tolerance` is 0."""
    ours, theirs = named(found), named(wanted)
    assert ours.keys() == theirs.keys(), f"{why}: outputs {list(ours)} became {list(theirs)}"
    for name, x in ours.items():
        near = torch.allclose(x, theirs[name], rtol=tolerance, atol=tolerance, equal_nan=True)
        if not near:
            row = (x != theirs[name]).flatten(1).any(1).nonzero()[0, 0].item()
            off = (x - theirs[name]).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}, first in row {row}")


def rows_of(given: Mapping[str, Features], rows: Any) -> Given:
    """Return some rows."""
    return {name: Features(*(x[rows] for x in one)) for name, one in given.items()}


def loss_of(output: FusionOutput) -> Tensor:
    """Return a number that depends on every output."""
    return torch.stack([x.square().sum() for x in named(output).values()]).sum()


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row."""
    return F.cross_entropy(logits, target, reduction="none")


def own_loss(fusion: Fusion, output: FusionOutput, phase: int = 0) -> Tensor:
    """Return the fusion's own loss of each row, (B,), as training would ask for it."""
    rows = torch.arange(len(output.logits))
    target = rows % output.logits.shape[1]
    memory = fusion.prepare(target)
    return fusion.loss(
        output,
        target,
        StepContext(rows=rows, epoch=1.5, phase=phase, criterion=entropy, memory=memory),
    )


def counts_for(make: Maker) -> list[int]:
    """Return the numbers of modalities that the fusion accepts, of 1, 2, 3 and 5."""
    entry = next((FUSIONS[name] for name in FUSIONS if FUSIONS[name].cls is make), None)
    needed = entry.at_least if entry is not None else getattr(make, "at_least", 1)
    return [n for n in (1, 2, 3, 5) if n >= needed]


# ---- the checks


@check
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
            for name, x in named(out).items():
                assert x.dtype == torch.float32, f"{where}: {name} is {x.dtype}"
                assert torch.isfinite(x).all(), f"{where}: {name} is not finite"


@check
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


@check
def the_content_of_a_missing_modality_changes_nothing(make: Maker) -> None:
    """Tried: NaN, infinity and 1e30 in everything that is absent or padding; equal to the bit."""
    fusion, given = build(make), features(patterns(3))
    wanted = fusion(poison(given, 0.0))
    for value in (float("nan"), float("inf"), 1e30):
        same(fusion(poison(given, value)), wanted, f"absent content set to {value}", tolerance=0)


@check
def gradients_stay_finite_and_do_not_reach_what_is_absent(make: Maker) -> None:
    """Tried: NaN in everything absent, every subset, backward through all outputs."""
    fusion = build(make)
    given = poison(features(patterns(3)), float("nan"))
    leaves = {
        n: Features(x.tokens.requires_grad_(), x.mask, x.pooled.requires_grad_())
        for n, x in given.items()
    }
    loss_of(fusion(leaves)).backward()
    for name, parameter in fusion.named_parameters():
        fine = parameter.grad is None or torch.isfinite(parameter.grad).all()
        assert fine, f"the gradient of {name} is not finite when a modality is absent"
    for name, x in leaves.items():
        for tensor, absent in ((x.tokens, ~x.mask), (x.pooled, ~x.mask.any(1))):
            if tensor.grad is not None:
                assert (tensor.grad[absent] == 0).all(), f"a gradient reaches absent {name}"


@check
def every_subset_of_modalities_gives_finite_outputs(make: Maker) -> None:
    """Tried: all 2^M subsets of 1, 2, 3 and 5 modalities, the empty one included."""
    for modalities in counts_for(make):
        out = build(make, modalities)(features(patterns(modalities)))
        for name, x in named(out).items():
            bad = (~torch.isfinite(x)).any(-1).nonzero()[:, 0].tolist()
            subset = patterns(modalities)[bad[:1]].tolist()
            assert not bad, f"{name} is not finite for presence {subset}"


@check
def padding_changes_nothing(make: Maker) -> None:
    """Tried: 1e6 in padded tokens, and three more padded tokens at the end."""
    fusion, given = build(make), features(full(4))
    wanted = fusion(given)
    same(fusion(poison(given, 1e6)), wanted, "padded tokens set to 1e6")
    longer = {
        name: Features(F.pad(x.tokens, (0, 0, 0, 3), value=7.0), F.pad(x.mask, (0, 3)), x.pooled)
        for name, x in given.items()
    }
    same(fusion(longer), wanted, "three padded tokens appended")


@check
def batch_mates_change_nothing(make: Maker) -> None:
    """Tried: every subset of three modalities in one batch, and each row alone."""
    fusion, given = build(make), features(patterns(3))
    together = fusion(given)
    for row, presence in enumerate(patterns(3).tolist()):
        alone = fusion(rows_of(given, slice(row, row + 1)))
        part = {n: x[row : row + 1] for n, x in named(together).items()}
        for name, x in named(alone).items():
            message = f"{name} of a sample with presence {presence} depends on its batch"
            torch.testing.assert_close(x, part[name], rtol=1e-10, atol=1e-10, msg=message)


@check
def every_present_modality_matters(make: Maker) -> None:
    """Tried: adding 1 to the features of one modality at a time."""
    fusion, given = build(make), features(full(2))
    wanted = fusion(given).logits
    for name, x in given.items():
        other = Features(x.tokens + 1, x.mask, x.pooled + 1)
        changed = fusion({**given, name: other}).logits
        assert not torch.allclose(changed, wanted), f"the logits do not depend on {name}"


@check
def every_parameter_is_registered_and_gets_a_gradient(make: Maker) -> None:
    """Tried: backward through outputs and own loss, in every phase; loose tensors searched for."""
    fusion = build(make)
    held = {id(x) for x in itertools.chain(fusion.parameters(), fusion.buffers())}
    for module in fusion.modules():
        for name, value in vars(module).items():
            inside = value if isinstance(value, list | tuple) else [value]
            for one in inside:
                loose = isinstance(one, torch.nn.Parameter | Tensor) and one.requires_grad
                assert not loose or id(one) in held, (
                    f"{type(module).__name__}.{name} is a tensor that no optimiser will see:"
                    " register it, or use nn.ParameterList or nn.ParameterDict"
                )
    given = features(patterns(3))
    for phase in range(len(fusion.phases)):
        output = fusion(given)
        (loss_of(output) + own_loss(fusion, output, phase).sum()).backward()
    for name, parameter in fusion.named_parameters():
        got = parameter.grad is not None and bool((parameter.grad != 0).any())
        assert got, f"{name} gets no gradient"


@check
def its_loss_is_finite_whatever_is_missing(make: Maker) -> None:
    """Tried: its own loss in training mode, every phase, every subset, NaN in what is absent."""
    fusion = build(make).train()
    for phase in range(len(fusion.phases)):
        given = poison(features(patterns(3)), float("nan"))
        torch.manual_seed(0)
        loss = own_loss(fusion, fusion(given), phase)
        assert loss.shape == (8,), f"the loss has shape {tuple(loss.shape)}; one per row is (8,)"
        bad = (~torch.isfinite(loss)).nonzero()[:, 0].tolist()
        assert not bad, f"the loss is not finite for presence {patterns(3)[bad[:1]].tolist()}"
        fusion.zero_grad()
        loss.sum().backward()
        for name, parameter in fusion.named_parameters():
            fine = parameter.grad is None or torch.isfinite(parameter.grad).all()
            assert fine, f"the gradient of {name} is not finite in training"
        assert own_loss(fusion, fusion(features(full(0))), phase).shape == (0,), "fails on no rows"


@check
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


@check
def gradients_are_the_derivatives(make: Maker) -> None:
    """Tried: torch.autograd.gradcheck on embedding and logits, two modalities."""
    fusion = build(make, 2)
    given = features(full(2, 2))
    flat = [x for one in given.values() for x in (one.tokens, one.pooled)]
    leaves = [x.clone().requires_grad_() for x in flat]

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(given.items(), zip(inputs[::2], inputs[1::2], strict=True), strict=True)
        made = {name: Features(t, one.mask, p) for (name, one), (t, p) in pairs}
        out = fusion(made)
        return out.embedding, out.logits

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@check
def it_compiles_whole_and_exports(make: Maker) -> None:
    """Tried: torch.compile(fullgraph=True) and torch.export, two modalities, float32, to 1e-5."""
    fusion = build(make, 2, dtype=torch.float32)
    given = features(full(4, 2), dtype=torch.float32)
    wanted = fusion(given)
    compiled = torch.compile(fusion, fullgraph=True, backend="aot_eager")
    same(compiled(given), wanted, "torch.compile", tolerance=1e-5)
    exported = torch.export.export(fusion, (given,), strict=False)
    same(exported.module()(given), wanted, "torch.export", tolerance=1e-5)


@check
def bfloat16_autocast_is_finite_and_near(make: Maker) -> None:
    """Tried: bfloat16 autocast, every subset; finite, and within 10 % of the largest value."""
    fusion = build(make, dtype=torch.float32)
    given = features(patterns(3), dtype=torch.float32)
    wanted = fusion(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fusion(poison(given, float("nan")))
    for name, x in named(found).items():
        assert torch.isfinite(x).all(), f"{name} is not finite under bfloat16"
        off = (x.float() - named(wanted)[name]).abs().max() / named(wanted)[name].abs().max()
        assert off < 0.1, f"{name} is {off:.0%} off under bfloat16"


@check
def a_state_dict_restores_it_exactly(make: Maker) -> None:
    """Tried: saving the state dict, loading it into a second one; equal to the bit."""
    fusion = build(make)
    other = make(dict(itertools.islice(DIMS.items(), 3)), DIM, OUTPUTS).double().eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save(fusion.state_dict(), path)
        other.load_state_dict(torch.load(path, weights_only=True))
    given = features(patterns(3))
    same(other(given), fusion(given), "after a state dict round trip", tolerance=0)


@check
def the_same_seed_builds_the_same_fusion(make: Maker) -> None:
    """Tried: building it twice under one seed."""
    first, second = (build(make).state_dict() for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), f"{name} differs between two builds with one seed"


@check
def the_order_of_the_dict_does_not_matter(make: Maker) -> None:
    """Tried: the same features in a dict of reversed order."""
    fusion, given = build(make), features(patterns(3))
    shuffled = dict(reversed(given.items()))
    same(fusion(shuffled), fusion(given), "modalities given in another order", tolerance=0)


@check
def the_order_of_its_modalities_does_not_matter(make: Maker) -> None:
    """Tried: building it for the reversed order with the same weights, if it says `symmetric`."""
    fusion, given = build(make), features(patterns(3))
    if not fusion.symmetric:
        return
    other = make(dict(reversed(fusion.dims.items())), DIM, OUTPUTS).double().eval()
    other.load_state_dict(fusion.state_dict())
    first, second = fusion(given), other(given)
    if second.weights is not None:
        second = second._replace(weights=second.weights.flip(1))
    same(second, first, "built for its modalities in reversed order")


@check
def large_features_give_finite_outputs(make: Maker) -> None:
    """Tried: features times 1e4, two classes, in float32 and under bfloat16 autocast."""
    fusion = build(make, dtype=torch.float32, outputs=2)
    given = features(full(64), dtype=torch.float32)
    large = {n: Features(1e4 * x.tokens, x.mask, 1e4 * x.pooled) for n, x in given.items()}
    for low in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            output = fusion(large)
            loss = own_loss(fusion, output).sum()
        kind = "bfloat16" if low else "float32"
        for name, x in named(output).items():
            assert torch.isfinite(x).all(), f"{name} is not finite for features of 1e4 in {kind}"
        fusion.zero_grad()
        loss.backward()
        for name, parameter in fusion.named_parameters():
            fine = parameter.grad is None or torch.isfinite(parameter.grad).all()
            assert fine, f"the gradient of {name} is not finite for features of 1e4 in {kind}"


@check
def one_modality_alone_is_enough_to_learn(make: Maker) -> None:
    """Tried: 150 steps per phase on two noisy bits, of which the first is the answer."""
    assert accuracy(make, "unique") > 0.95, (
        f"reaches {accuracy(make, 'unique'):.2f} on one modality's bit"
    )


def accuracy(make: Maker, task: str, steps: int = 150) -> float:
    """Train on two noisy bits, one per modality; return the accuracy on fresh samples.

    `unique`: the answer is the first bit. `xor`: whether they differ, of which no bit alone says
    anything, so a sum of unimodal logits stays at chance. Every phase gets `steps` steps; the last
    ends early once it answers everything.
    """
    torch.manual_seed(0)
    fusion = make({"a": 4, "b": 4}, 16, 2).float().train()
    rows, target = torch.arange(128), torch.zeros(128, dtype=torch.int64)
    memory = fusion.prepare(target)
    for number, phase in enumerate(fusion.phases):
        learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
        optimizer = torch.optim.Adam(learning, lr=1e-2)
        for step in range(steps):
            given, target = _bits(task, 128)
            moment = StepContext(
                rows=rows, epoch=step / 10, phase=number, criterion=entropy, memory=memory
            )
            loss = fusion.loss(fusion(given), target, moment).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = number == len(fusion.phases) - 1
            if last and step % 20 == 19 and _accuracy(fusion, task) == 1:
                break
    return _accuracy(fusion, task)


@torch.no_grad()
def _accuracy(fusion: Fusion, task: str) -> float:
    given, target = _bits(task, 1000)
    right = fusion.eval()(given).logits.argmax(-1) == target
    fusion.train()
    return right.double().mean().item()


def _bits(task: str, rows: int) -> tuple[Given, Tensor]:
    bits = torch.randint(0, 2, (rows, 2))
    given = {}
    for column, name in enumerate(("a", "b")):
        signal = (2.0 * bits[:, column, None] - 1) * torch.tensor([1.0, -1.0, 0.5, 0.0])
        pooled = signal + 0.1 * torch.randn(rows, 4)
        given[name] = Features(pooled[:, None], torch.ones(rows, 1, dtype=torch.bool), pooled)
    target = bits[:, 0] if task == "unique" else (bits[:, 0] != bits[:, 1]).long()
    return given, target


check(absence.an_uninformative_modality_can_be_dropped)
check(absence.missing_modalities_never_cost_more_than_all_knowledge)


# ---- running them


def run(make: Maker) -> Iterator[tuple[str, str | None]]:
    """Yield each check's name and what failed, or None."""
    for name, function in CHECKS.items():
        try:
            function(make)
        except Exception as error:  # whatever a fusion raises is a finding
            yield name, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            yield name, None


def maker(target: str) -> Maker:
    """Resolve a fusion's name, `module:Class` or `file.py:Class`."""
    return FUSIONS[target].cls


def main_check(target: str) -> int:
    """Print what was tried and what failed; return 0 if nothing did."""
    failed = 0
    for name, problem in run(maker(target)):
        print(f"{'FAIL' if problem else 'ok  '}  {name.replace('_', ' ')}")
        if problem:
            failed += 1
            print(f"      {CHECKS[name].__doc__}\n      Found: {problem}")
    print(f"{target}: {len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    return int(failed > 0)
