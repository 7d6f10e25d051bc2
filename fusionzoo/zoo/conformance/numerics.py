"""A fusion's shapes and dtypes, compilation, half precision, saving and building."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch

from fusionzoo.structures import Features, FusionOutput

from .checks import Checks
from .fusions import (
    DIM,
    DIMS,
    OUTPUTS,
    Maker,
    assert_equal,
    build,
    counts_for,
    features,
    full,
    own_loss,
    patterns,
    poison,
    tensors_of,
)

CHECKS: Checks[Maker] = Checks()


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
def it_compiles_whole_and_exports(make: Maker) -> None:
    """Tried: torch.compile(fullgraph=True) and torch.export, two modalities, float32, to 1e-5."""
    fusion = build(make, 2, dtype=torch.float32)
    inputs = features(full(4, 2), dtype=torch.float32)
    expected = fusion(inputs)
    compiled = torch.compile(fusion, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(inputs), expected, "torch.compile", tolerance=1e-5)
    exported = torch.export.export(fusion, (inputs,), strict=False)
    assert_equal(exported.module()(inputs), expected, "torch.export", tolerance=1e-5)


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
    other = make(dict(itertools.islice(DIMS.items(), 3)), DIM, OUTPUTS).double().eval()
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
        for name, parameter in fusion.named_parameters():
            finite = parameter.grad is None or torch.isfinite(parameter.grad).all()
            assert finite, f"the gradient of {name} is not finite for features of 1e4 in {kind}"
