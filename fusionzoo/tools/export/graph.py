"""The graph of a whole model: inputs with fixed names, free sizes, compared with the model.

Shapes: `B` rows, `M` modalities, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from fusionzoo.datasets.collate import prepare
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.tabular import Numbers, TabularEncoder
from fusionzoo.errors import FusionZooError, explained, located
from fusionzoo.machine.graphs import (
    TOLERANCE,
    difference,
    export_program,
    onnx_bytes,
    open_session,
    run_session,
)
from fusionzoo.model.fusion_model import FusionModel, hide_absent
from fusionzoo.model.standardise import standardise
from fusionzoo.structures import (
    ITEM_COUNTS,
    Audio,
    Batch,
    Features,
    FusionOutput,
    Sample,
    evaluating,
)

PRESENT = "present"  # the input that says which modalities each row has, bool (B, M)
TRACED_ROWS = 4
MOST_ROWS = 32  # in which subsets of modalities are compared
Inputs = dict[str, dict[str, Tensor]]  # modality -> the encoder's inputs by name
SCALES = (1.0, 3.0, 400.0, 500.0)  # of raw values, in the units of `raw_value`
TRACED = (2.0, 1.0, 0.5)  # scales of the batch that is traced: the first within the bounds


class ExportModel(nn.Module):
    """A model whose every row runs through every encoder: absence is a mask, no rows are gathered.

    Its answers are those of `model(batch)` in evaluation mode. `FusionModel.forward`, which skips
    the encoders of what is absent, has sizes that depend on the data, so no graph can hold it.

    Shapes: `forward(present (B, M), inputs)` returns the tensors of `tensors_of`.
    """

    def __init__(self, model: FusionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, present: Tensor, inputs: Inputs) -> list[Tensor]:
        model = self.model
        columns = dict(zip(model.modalities, present.unbind(1), strict=True))
        hidden = {
            name: hide_absent(encoder.encode(inputs[name]), columns[name])
            for name, encoder in model.named_encoders()
        }
        features = standardise(hidden, model.standardise)
        return tensors_of(model, model.fuse(features), features, columns)


def tensors_of(
    model: FusionModel,
    output: FusionOutput,
    features: Mapping[str, Features],
    columns: Mapping[str, Tensor],
) -> list[Tensor]:
    """Return the outputs of a graph: `fused`, `logits`, `weights` if the fusion has them, and
    `aligned_<modality>`."""
    tensors = [output.embedding, model.calibrate(output.logits.float(), features)]
    if output.weights is not None:
        tensors.append(output.weights)
    for name, project in model.align.items():
        here = columns[name][:, None]
        tensors.append(F.normalize(project(features[name].pooled.masked_fill(~here, 0))) * here)
    return tensors


@torch.no_grad()
def expected(model: FusionModel, batch: Batch) -> list[Tensor]:
    """Return what a graph must answer: the model's own outputs."""
    columns = dict(zip(model.modalities, batch.present.unbind(1), strict=True))
    features = model.encode(batch)
    return tensors_of(model, model.fuse(features), features, columns)


# ---- sizes that stay free


class Size(NamedTuple):
    """The free size of a modality's inputs, such as the number of tokens."""

    name: str
    least: int
    most: int | None  # None: unbounded

    def dim(self) -> Any:
        """Return the dimension for `torch.export`."""
        return Dim(self.name, min=max(1, self.least), max=self.most)


class VaryingDims(NamedTuple):
    """Which dimensions of a modality's inputs vary between batches, beside the rows."""

    size: Size | None  # None: every row has one shape
    places: Mapping[str, int]  # input -> its dimension of that size


def raw_value(encoder: Encoder, scale: float, draw: torch.Generator) -> Any:
    """Make a value of the encoder's kind, as the data holds it, whose length is about `scale`."""
    if encoder.kind == "image":
        return torch.randint(0, 256, (3, 47, 61), generator=draw, dtype=torch.uint8)
    if encoder.kind == "text":
        letters = torch.randint(97, 123, (max(1, round(3 * scale)), 4), generator=draw)
        return " ".join("".join(map(chr, word)) for word in letters.tolist())
    if encoder.kind == "audio":
        return Audio(0.1 * torch.randn(round(1600 * scale), generator=draw), 16_000)
    reader = encoder.reader
    if isinstance(reader, TabularEncoder):
        return {
            column.name: column.mean + column.std * float(torch.randn(1, generator=draw))
            if isinstance(column, Numbers)
            else (*column.values, "another")[number % (len(column.values) + 1)]
            for number, column in enumerate(reader.columns)
        }
    width = int(getattr(reader, "in_dim", 0))
    if not width:
        raise FusionZooError(
            f"{encoder.modality}: what its encoder reads is not known, so no graph can be compared"
            " with it; export it with --data of your own"
        )
    shape = (width,) if encoder.kind == "vector" else (round(4 * scale), width)
    return torch.randn(shape, generator=draw)


def _inputs_of(encoder: Encoder, values: Sequence[Any]) -> dict[str, Tensor]:
    processor = encoder.processor(False)
    items = [prepare(processor, value) for value in values]
    if any(len(parts) > 1 for parts in items):
        raise FusionZooError(
            f"{encoder.modality}: a graph takes one item a row, and its encoder splits a long clip"
            " into windows; set windows=1"
        )
    return dict(processor.collate([parts[0] for parts in items]))


def layout_of(encoder: Encoder) -> VaryingDims:
    """Find out which sizes vary, and within what bounds, from what the processor makes of short
    and long values."""
    draw = torch.Generator().manual_seed(0)
    processor = encoder.processor(False)
    batches = [dict(processor.collate([processor.blank()] * 2))]  # the smallest valid item
    batches += [_inputs_of(encoder, [raw_value(encoder, scale, draw)] * 2) for scale in SCALES]
    places: dict[str, int] = {}
    sizes: tuple[int, ...] = ()
    for name in batches[0]:
        shapes = [inputs[name].shape for inputs in batches]
        varying = [
            place for place in range(1, len(shapes[0])) if len({x[place] for x in shapes}) > 1
        ]
        if len(varying) > 1:
            raise FusionZooError(
                f"{encoder.modality}: input {name!r} has {len(varying)} free sizes"
            )
        if varying:
            lengths = tuple(shape[varying[0]] for shape in shapes)
            if sizes and lengths != sizes:
                raise FusionZooError(f"{encoder.modality}: its inputs vary in unlike sizes")
            places[name], sizes = varying[0], lengths
    if not places:
        return VaryingDims(None, {})
    least, most = min(sizes), sizes[-1] if sizes[-1] == sizes[-2] else None
    return VaryingDims(Size(f"{encoder.modality}_length", least, most), places)


def shapes_of(inputs: Mapping[str, Tensor], layout: VaryingDims, batch: Any) -> dict[str, Any]:
    """Return the free dimensions of each input, for `torch.export`."""
    length = None if layout.size is None else layout.size.dim()
    return {
        name: {0: batch, **({layout.places[name]: length} if name in layout.places else {})}
        for name in inputs
    }


# ---- batches to trace and to compare


def presence(modalities: int, rows: int) -> list[tuple[bool, ...]]:
    """Return subsets of modalities, the full one first: all of them if there are at most `rows`."""
    every = list(product([True, False], repeat=modalities))
    step = max(1, len(every) // rows)
    return every[::step][:rows]


def batch_of(
    model: FusionModel, subsets: Sequence[Sequence[bool]], scale: float, seed: int
) -> Batch:
    """Make a batch of drawn values with lengths around `scale`; rows of one length where a graph
    needs that."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for row, subset in enumerate(subsets):
        values = {}
        for (name, encoder), here in zip(model.named_encoders(), subset, strict=True):
            length = scale if encoder.one_length else scale * (1 + row % 3) / 3
            values[name] = raw_value(encoder, length, draw) if here else None
        samples.append(Sample(str(row), "", None, values))
    batch: Batch = model.collate()(samples)
    return batch


def traced_batch(model: FusionModel, layouts: Mapping[str, VaryingDims]) -> Batch:
    """Make the batch to trace, of lengths between the bounds: one at its bound may be frozen."""
    rows = presence(len(model.modalities), 1) * TRACED_ROWS
    for scale in TRACED:
        batch = batch_of(model, rows, scale, 0)
        inputs = plain_inputs(model.modalities, batch)
        lengths = [
            (layout.size, inputs[name][key].shape[place])
            for name, layout in layouts.items()
            for key, place in layout.places.items()
        ]
        if all(
            size is None or (size.least < length and (size.most is None or length < size.most))
            for size, length in lengths
        ):
            break
    return batch


def comparisons(model: FusionModel) -> Iterator[tuple[str, Batch]]:
    """Yield batches of other numbers of rows, other lengths and every subset than was traced."""
    count = len(model.modalities)
    subsets = presence(count, MOST_ROWS)
    yield "every subset of modalities", batch_of(model, subsets, 3.0, 1)
    yield "one row", batch_of(model, subsets[:1], 1.0, 2)
    longer = [*subsets[:3], *subsets[-2:]]
    yield f"{len(longer)} rows of other lengths", batch_of(model, longer, 5.0, 3)


def plain_inputs(modalities: Iterable[str], batch: Batch) -> Inputs:
    """Return a batch's inputs, without rows of several items, which no graph takes."""
    inputs: Inputs = {}
    for name in modalities:
        tensors = batch.inputs[name]
        if isinstance(tensors, Features) or ITEM_COUNTS in tensors:
            raise FusionZooError(f"{name}: an exported model takes one item a row, not several")
        inputs[name] = tensors
    return inputs


def by_name(present: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """Return a graph's inputs by their names: `present`, `<modality>.<tensor>`."""
    named = {f"{m}.{name}": x for m, tensors in inputs.items() for name, x in tensors.items()}
    return {PRESENT: present, **named}


# ---- graphs


class Graph(NamedTuple):
    """A traced graph, with the names of its inputs and outputs."""

    program: Any  # torch.export.ExportedProgram
    inputs: list[str]
    outputs: list[str]

    def onnx(self) -> bytes:
        """Translate it to ONNX; an operation that ONNX lacks is one clear error."""
        with explained("it cannot be written as ONNX"):
            return onnx_bytes(self.program, self.inputs, self.outputs)


def trace(model: FusionModel) -> Graph:
    """Trace a whole model, with free numbers of rows and lengths."""
    layouts = {name: layout_of(encoder) for name, encoder in model.named_encoders()}
    batch = traced_batch(model, layouts)
    inputs = plain_inputs(model.modalities, batch)
    rows = Dim("batch", min=1)
    shapes = {name: shapes_of(inputs[name], layout, rows) for name, layout in layouts.items()}
    with evaluating(model):
        with torch.no_grad():
            weights = ["weights"] if model(batch).weights is not None else []
        with explained("it cannot be traced by torch.export"):
            whole, arguments = ExportModel(model).eval(), (batch.present, inputs)
            program = export_program(whole, arguments, ({0: rows}, shapes))
    outputs = ["fused", "logits", *weights, *(f"aligned_{name}" for name in model.align)]
    return Graph(program, list(by_name(batch.present, inputs)), outputs)


def check(model: FusionModel, run: Any, what: str) -> float:
    """Compare a graph with the model at other sizes than were traced; return the largest error.

    `run(present, inputs)` returns the graph's outputs. A graph that differs, or fails, is refused.
    """
    worst = 0.0
    with evaluating(model):
        for case, batch in comparisons(model):
            inputs = plain_inputs(model.modalities, batch)
            with explained(f"{what} fails on {case}"), located(f"{what} fails on {case}"):
                outputs = run(batch.present, inputs)
            worst = max(worst, off := difference(outputs, expected(model, batch)))
            if off > TOLERANCE:
                raise FusionZooError(
                    f"{what} answers otherwise than the model: it differs by {off:.2g} on {case}"
                    f" (at most {TOLERANCE:g} is allowed), so nothing is written"
                )
    return worst


def onnx_runner(model: bytes | str) -> Any:
    """Return a function of `present` and inputs that runs an ONNX model on one thread."""
    session = open_session(model, threads=1)
    return lambda present, inputs: run_session(session, by_name(present, inputs))
