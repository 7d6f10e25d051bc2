"""The contract of encoders: a row's features depend on that row alone, and survive a rebuild."""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor

import fusionzoo
from fusionzoo.encoders import Encoder, create_encoder, entry_of
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.structures import KINDS, Audio, Features, Sample

from .checks import Checks, assert_registered

Maker = Callable[..., Encoder]  # (freeze=, assets=) -> Encoder
Inputs = dict[str, Tensor]
WIDTH = 5  # of vectors, and of the steps of sequences
SIZES = ((40, 60), (70, 50), (64, 64))  # height, width
TEXTS = (("a cat", "a much longer line of text about cats", ""), ("to do", "quite another", "x"))
CLIPS = ((16_000, 9_000), (22_050, 20_000), (16_000, 100))  # Hz, samples
STEPS = (3, 6, 1)
COLUMNS: tuple[dict[str, Any], ...] = (  # of an encoder of a table's columns
    {"name": "age", "mean": 40.0, "std": 12.0, "edges": [18.0, 30.0, 52.0, 90.0]},
    {"name": "colour", "values": ["blue", "red", "yellow"]},
    {"name": "weight", "mean": 70.0, "std": 9.0, "edges": [40.0, 65.0, 80.0, 130.0]},
    {"name": "place", "values": ["hall", "yard"]},
)
CHECKS: Checks[Maker] = Checks()
NEAR = 1e-4  # what float32 leaves of a row that runs in another batch
LIBRARIES = ("timm", "torchaudio", "torchvision", "transformers")


def build(make: Maker, **options: Any) -> Encoder:
    """Build an encoder, every parameter away from its initial value."""
    torch.manual_seed(0)
    encoder = make(**options)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return encoder.eval()


def raw_values(encoder: Encoder, seed: int = 0) -> list[Any]:
    """Make three values of different sizes, as the data set decodes them; the sizes are fixed."""
    draw = torch.Generator().manual_seed(seed)
    if encoder.kind == "image":
        options = dict[str, Any](generator=draw, dtype=torch.uint8)
        return [torch.randint(0, 256, (3, *size), **options) for size in SIZES]
    if encoder.kind == "text":
        return list(TEXTS[seed % len(TEXTS)])
    if encoder.kind == "audio":
        return [Audio(0.1 * torch.randn(n, generator=draw), rate) for rate, n in CLIPS]
    if encoder.kind == "tabular":
        columns = encoder.spec.get("columns", COLUMNS)
        return [_cells(columns, number, draw) for number in range(3)]
    width = int(getattr(encoder, "in_dim", WIDTH))
    shapes = [(width,)] * 3 if encoder.kind == "vector" else [(steps, width) for steps in STEPS]
    return [torch.randn(shape, generator=draw) for shape in shapes]


def _cells(
    columns: Sequence[Mapping[str, Any]], number: int, draw: torch.Generator
) -> dict[str, Any]:
    """Make the cells of sample 0, 1 or 2: each column is empty in sample 1 or 2; sample 2 has
    categories that no encoder knows."""
    cells: dict[str, Any] = {}
    for place, column in enumerate(columns):
        drawn = float(torch.randn(1, generator=draw))
        if number and (number + place) % 2:
            cells[column["name"]] = None
        elif "mean" in column:
            cells[column["name"]] = column["mean"] + column["std"] * drawn
        elif number < 2 and column["values"]:
            values = column["values"]
            cells[column["name"]] = values[int(1e6 * abs(drawn)) % len(values)]
        else:
            cells[column["name"]] = "something new"
    return cells


def describe(value: Any) -> str:
    """Name a raw value in a message."""
    if isinstance(value, Mapping):
        return f"the cells {dict(value)}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, Audio):
        return f"a clip of {value.frames} samples at {value.rate} Hz"
    return f"a value of shape {tuple(value.shape)}"


def batch_of(encoder: Encoder, values: Sequence[Any]) -> Inputs:
    """Prepare and collate raw values; None stands for the blank sample."""
    prepare = encoder.processor(False)
    return prepare.collate([prepare.blank() if v is None else prepare(v) for v in values])


@torch.no_grad()
def features_of(encoder: Encoder, values: Sequence[Any]) -> Features:
    """Encode raw values."""
    features: Features = encoder(batch_of(encoder, values))
    return features


def poisoned(inputs: Mapping[str, Tensor]) -> Inputs:
    """Overwrite what a mask among the inputs, bool (B, T), marks as padding; else change nothing.

    Floats become NaN; integers, which may be indices, become the largest in the batch.
    """
    masks = [x for x in inputs.values() if x.dtype == torch.bool and x.ndim == 2]
    changed = dict(inputs)
    for name, x in inputs.items():
        for mask in masks:
            if x.dtype != torch.bool and x.shape[:2] == mask.shape:
                padding = ~mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
                value = float("nan") if x.is_floating_point() else int(x.max())
                changed[name] = x.masked_fill(padding, value)
    return changed


def assert_equal(
    features: Features, expected: Features, row: int, other: int, why: str, tolerance: float
) -> None:
    """Require that row `row` of `features` equals row `other` of `expected`, padding aside."""
    tokens, wanted = features.tokens[row][features.mask[row]], expected.tokens[other]
    wanted = wanted[expected.mask[other]]
    assert len(tokens) == len(wanted), f"{why}: {len(wanted)} real tokens became {len(tokens)}"
    pairs = {"pooled": (features.pooled[row], expected.pooled[other]), "tokens": (tokens, wanted)}
    for name, (x, y) in pairs.items():
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance):
            off = (x - y).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}")


def trained(make: Maker) -> tuple[FusionModel, list[Sample]]:
    """Train a model with the encoder for two steps on three samples, one of which lacks its input.

    Require gradients that are finite, and not all zero unless nothing is to be trained.
    """
    torch.manual_seed(0)
    encoder = make(freeze="none")
    other = {"name": "vector/identity", "kind": "vector", "in_dim": 2}
    model = create_model("concat", {"tried": encoder, "other": other}, 2, dim=8)
    values = [*raw_values(encoder)[:2], None]
    samples = [
        Sample(str(n), "", None, {"tried": value, "other": torch.ones(2)})
        for n, value in enumerate(values)
    ]
    batch = model.train().collate(train=True)(samples)
    learning = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch).logits, torch.tensor([0, 1, 0]))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, 1.0)
        assert loss.isfinite() and norm.isfinite(), f"a loss of {loss}, gradients of norm {norm}"
        assert norm > 0 or not learning, "no gradient reaches the encoder"
        optimizer.step()
    return model.eval(), samples


def assert_answers_alike(model: FusionModel, loaded: FusionModel, samples: list[Sample]) -> None:
    """Require that a model answers as before when it is loaded.

    Within 1e-5: the last bits of some networks (Nyströmformer) follow the addresses of memory.
    """
    with torch.no_grad():
        expected, logits = (x.eval()(x.collate()(samples)).logits for x in (model, loaded))
    off = (logits - expected).abs().max().item()
    assert off <= 1e-5, f"the loaded model answers otherwise, by {off:.2g}"


def maker(target: str, settings: Mapping[str, Any] | None = None) -> Maker:
    """Return what builds the encoder of a name, `module:Class` or `file.py:Class`.

    An encoder of vectors or sequences is built for width 5, one of columns for four of them, unless
    `settings` say otherwise.
    """
    chosen = dict(settings or {})
    entry = entry_of(target, chosen.get("kind"))
    kind = chosen.pop("kind", entry.family if entry else "")
    if entry and "in_dim" in entry.parameters:
        chosen.setdefault("in_dim", WIDTH)
    if entry and entry.family == "tabular" and "columns" in entry.parameters:
        chosen.setdefault("columns", [dict(column) for column in COLUMNS])
    return partial(create_encoder, kind, target, **chosen)


@CHECKS.add
def shapes_and_dtypes_are_those_of_features(make: Maker) -> None:
    """Tried: three values of different sizes together, and each alone."""
    encoder = build(make)
    assert encoder.kind in KINDS, f"kind {encoder.kind!r} is none of {', '.join(KINDS)}"
    values = raw_values(encoder)
    for rows in (values, *([value] for value in values)):
        out = features_of(encoder, rows)
        where = "three values" if len(rows) > 1 else describe(rows[0])
        assert isinstance(out, Features), f"{where}: returned {type(out).__name__}"
        shape = (len(rows), out.tokens.shape[1], encoder.dim)
        assert out.tokens.shape == shape, f"{where}: tokens {tuple(out.tokens.shape)}, not {shape}"
        assert out.pooled.shape == (len(rows), encoder.dim), f"{where}: pooled {out.pooled.shape}"
        assert out.mask.shape == shape[:2], f"{where}: mask {tuple(out.mask.shape)}"
        assert out.mask.dtype == torch.bool, f"{where}: the mask is {out.mask.dtype}"
        assert out.mask.any(1).all(), f"{where}: a row has no real token, as if it were missing"
        for name, x in (("tokens", out.tokens[out.mask]), ("pooled", out.pooled)):
            assert x.dtype == torch.float32, f"{where}: {name} are {x.dtype}"
            assert torch.isfinite(x).all(), f"{where}: {name} are not finite"


@CHECKS.add
def padding_changes_nothing(make: Maker) -> None:
    """Tried: each of three values of different sizes alone, and padded to the longest."""
    encoder = build(make)
    values = raw_values(encoder)
    together = features_of(encoder, values)
    for row, value in enumerate(values):
        why = f"{describe(value)}, alone and in a batch"
        assert_equal(together, features_of(encoder, [value]), row, 0, why, NEAR)


@CHECKS.add
def batch_mates_change_nothing(make: Maker) -> None:
    """Tried: each value beside two pairs of other values."""
    encoder = build(make)
    values, others = raw_values(encoder), raw_values(encoder, seed=1)
    for value in values:
        first, second = (features_of(encoder, [value, *mates[:2]]) for mates in (values, others))
        assert_equal(second, first, 0, 0, f"{describe(value)} beside other values", NEAR)


@CHECKS.add
def the_content_of_masked_inputs_changes_nothing(make: Maker) -> None:
    """Tried: NaN, or another index, where a mask among the inputs says padding."""
    encoder = build(make)
    inputs = batch_of(encoder, raw_values(encoder))
    with torch.no_grad():
        expected, output = encoder(inputs), encoder(poisoned(inputs))
    for row in range(3):
        assert_equal(output, expected, row, row, f"padding overwritten, row {row}", NEAR)


@CHECKS.add
def the_blank_sample_works(make: Maker) -> None:
    """Tried: what stands for a missing modality, alone and beside a value, in training too."""
    encoder = build(make)
    value = raw_values(encoder)[0]
    for train in (False, True):
        prepare = encoder.processor(train)
        blank, item = prepare.blank(), prepare(value)
        assert blank.keys() == item.keys(), f"blank() has {list(blank)}, a value {list(item)}"
        for items in ([blank], [item, blank], [blank, blank]):
            inputs = prepare.collate(items)
            for name, x in inputs.items():
                assert len(x) == len(items), f"collate makes {len(x)} rows of {name}"
            with torch.no_grad():
                pooled = encoder(inputs).pooled
            assert torch.isfinite(pooled).all(), "the blank sample's features are not finite"
    beside = features_of(encoder, [value, None])
    assert_equal(beside, features_of(encoder, [value]), 0, 0, "beside a blank sample", NEAR)


@CHECKS.add
def the_processor_pickles(make: Maker) -> None:
    """Tried: pickling the processors of training and evaluation; equal items to the bit."""
    encoder = build(make)
    for train in (False, True):
        prepare = encoder.processor(train)
        unpickled = pickle.loads(pickle.dumps(prepare))
        for value in raw_values(encoder):
            why = f"{describe(value)}, after unpickling"
            _assert_same_items(unpickled(value), prepare(value), why)
        _assert_same_items(unpickled.blank(), prepare.blank(), "the blank sample, after unpickling")


@CHECKS.add
def augmentation_draws_from_its_generator_alone(make: Maker) -> None:
    """Tried: two generators of one seed; the global generators are as they were."""
    encoder = build(make)
    prepare = encoder.processor(True)
    before, python = torch.get_rng_state(), random.getstate()
    for value in raw_values(encoder):
        first, second = (prepare(value, torch.Generator().manual_seed(3)) for _ in range(2))
        _assert_same_items(second, first, f"{describe(value)}, with one seed twice")
        why = f"{describe(value)}, without a generator"
        _assert_same_items(prepare(value), prepare(value), why)
    untouched = torch.equal(before, torch.get_rng_state()) and python == random.getstate()
    assert untouched, "the processor draws from a global generator"


def _assert_same_items(item: Mapping[str, Any], expected: Mapping[str, Any], why: str) -> None:
    assert item.keys() == expected.keys(), f"{why}: {list(expected)} became {list(item)}"
    for name, x in expected.items():
        assert torch.equal(item[name], x), f"{why}: {name} differs"


@CHECKS.add
def assets_and_weights_rebuild_it(make: Maker) -> None:
    """Tried: `save_assets` and safetensors into a folder, rebuilt from it; equal to the bit."""
    encoder = build(make)
    values = raw_values(encoder)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder.save_assets(folder)
        save_model(encoder, str(folder / "weights"))
        torch.manual_seed(1)
        rebuilt = make(assets=folder).eval()
        load_model(rebuilt, str(folder / "weights"), strict=True)
        output, expected = features_of(rebuilt, values), features_of(encoder, values)
    for part, x, y in zip(Features._fields, output, expected, strict=True):
        assert torch.equal(x, y), f"after a rebuild from its folder {part} differs"


@CHECKS.add
def a_trained_model_answers_alike_once_it_is_loaded(make: Maker) -> None:
    """Tried: two steps on samples one of which lacks the modality, `save`, `load`; within 1e-5."""
    model, samples = trained(make)
    with tempfile.TemporaryDirectory() as folder:
        assert_answers_alike(model, fusionzoo.load(model.save(folder)), samples)


@CHECKS.add
def the_same_seed_builds_the_same_encoder(make: Maker) -> None:
    """Tried: building it twice under one seed."""
    first, second = (build(make).state_dict() for _ in range(2))
    assert first.keys() == second.keys(), "two builds have other names of weights"
    for name, x in first.items():
        assert torch.equal(x, second[name]), f"{name} differs between two builds with one seed"


@CHECKS.add
def a_frozen_encoder_stays_as_it_is(make: Maker) -> None:
    """Tried: `freeze="all"`, then training mode: no gradient, no buffer moves, equal outputs."""
    encoder = build(make, freeze="all")
    inputs = batch_of(encoder, raw_values(encoder))
    expected = encoder(inputs)
    before = {name: x.clone() for name, x in encoder.state_dict().items()}
    encoder.train()
    output = encoder(inputs)
    for part, x, y in zip(Features._fields, output, expected, strict=True):
        assert not x.requires_grad, f"{part} of a frozen encoder want a gradient"
        assert torch.equal(x, y), f"{part} of a frozen encoder differ in training mode"
    learning = [name for name, p in encoder.named_parameters() if p.requires_grad]
    assert not learning, f"frozen, and yet {learning[0]} wants a gradient"
    for name, x in encoder.state_dict().items():
        assert torch.equal(x, before[name]), f"frozen, and yet {name} moves in training mode"


@CHECKS.add
def every_parameter_is_registered_and_gets_a_gradient(make: Maker) -> None:
    """Tried: backward from tokens and pooled; what a library's model holds in spare is allowed."""
    encoder = build(make)
    assert_registered(encoder)
    out = encoder(batch_of(encoder, raw_values(encoder)))
    loss = out.tokens[out.mask].square().sum() + out.pooled.square().sum()
    if not any(p.requires_grad for p in encoder.parameters()):
        return
    loss.backward()
    origins = {name: type(part).__module__ for name, part in encoder.named_children()}
    borrowed = tuple(f"{n}." for n, x in origins.items() if x.partition(".")[0] in LIBRARIES)
    for name, parameter in encoder.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            spare = name.startswith(borrowed) or not parameter.requires_grad
            assert spare, f"{name} gets no gradient: use or remove it"
        else:
            assert torch.isfinite(gradient).all(), f"the gradient of {name} is not finite"
            assert gradient.any(), f"the gradient of {name} is zero"


@CHECKS.add
def a_value_that_does_not_vary_is_prepared_alike_in_training(make: Maker) -> None:
    """Tried: three values, prepared for training with a random generator, and for evaluation."""
    encoder = build(make)
    training, evaluation = encoder.processor(True), encoder.processor(False)
    for value in raw_values(encoder):
        if not training.varies(value):
            expected = evaluation(value)
            for name, x in training(value, torch.Generator().manual_seed(1)).items():
                assert torch.equal(x, expected[name]), f"{describe(value)}: {name} differs"


@CHECKS.add
def float64_and_bfloat16_are_near_float32(make: Maker) -> None:
    """Tried: the encoder in float64, and under bfloat16 autocast: within 0.1 % and 10 %."""
    encoder = build(make)
    inputs = batch_of(encoder, raw_values(encoder))
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        expected = encoder(inputs).pooled
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = encoder(inputs).pooled
        exact = encoder.double()(double).pooled
    for name, pooled, share in (("bfloat16 autocast", half, 0.1), ("float64", exact, 1e-3)):
        assert torch.isfinite(pooled).all(), f"not finite in {name}"
        off = (pooled.float() - expected).abs().max() / expected.abs().max()
        assert off < share, f"{off:.1%} off in {name}"
