"""Extract embeddings: divide the table, decode in workers, encode and fuse, write in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.config import EmbedConfig, TrainConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.loader import make_loader
from fusionzoo.errors import FusionZooError, is_out_of_memory
from fusionzoo.features.encode import key_of, weights_hash
from fusionzoo.features.frozen import FrozenFeatures, stored_features
from fusionzoo.ground.plugins import code_digest
from fusionzoo.ground.version import __version__
from fusionzoo.inputs.identity import data_identity
from fusionzoo.machine.devices import GPUS
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Batch, FusionOutput, check_finite, evaluating
from fusionzoo.training.balance.matryoshka import prefix_sizes
from fusionzoo.training.objective import dummy_batch
from fusionzoo.training.recompute import save_memory_and_compile

from .layers import Layers, check_layers, column_of, read_setting, reading_layers
from .parts import PartsFolder, WritingThread

PROBABILITIES, WEIGHTS = "probabilities", "weights"
FORMAT = 1  # of the parts; raised when the same settings give other data
LABELS = ("id", "split", "target")  # text columns that are copied from the data set
_Computed = tuple[Tensor, Tensor, dict[str, Tensor]]  # positions (B,), present (B, M), (B, D) each
READABLE = "readable"  # False: nothing of the row could be read, and its vectors are null


class PlannedBatch(NamedTuple):
    """A batch: some rows of a part."""

    part: int
    rows: Tensor  # (B,) int64, positions in the data set
    is_last: bool  # of its part


class ExtractionPlan:
    """The parts of an extraction and their batches, a function of the data and settings alone.

    So the vectors, whose last bits depend on what is computed together, are those of an
    uninterrupted run whatever was computed before, and by whichever process.
    """

    def __init__(self, lengths: Tensor, rows_per_part: int, batch_size: int) -> None:
        self.lengths, self.rows_per_part, self.batch_size = lengths, rows_per_part, batch_size

    @property
    def num_parts(self) -> int:
        return -(-len(self.lengths) // self.rows_per_part)

    def rows(self, part: int) -> range:
        """Return the rows of a part."""
        start = part * self.rows_per_part
        return range(start, min(start + self.rows_per_part, len(self.lengths)))

    def longest_first(self, parts: Sequence[int]) -> list[int]:
        """Move the part with the longest row to the front: where memory is short, it shows there.

        >>> ExtractionPlan(torch.tensor([1.0, 2, 9, 3, 4, 4]), 2, 1).longest_first([0, 1, 2])
        [1, 0, 2]
        """
        if not parts:
            return []
        first = max(parts, key=lambda part: self._part_lengths(part).max())
        return [first, *(part for part in parts if part != first)]

    def batches(self, parts: Sequence[int]) -> Iterator[PlannedBatch]:
        """Yield the batches of some parts, in each part those with the longest rows first."""
        for part in parts:
            order = self._part_lengths(part).argsort(descending=True, stable=True)
            batches = (order + self.rows(part).start).split(self.batch_size)
            for number, rows in enumerate(batches, start=1):
                yield PlannedBatch(part, rows, number == len(batches))

    def _part_lengths(self, part: int) -> Tensor:
        rows = self.rows(part)
        return self.lengths[rows.start : rows.stop]


@dataclass(frozen=True, kw_only=True)
class VectorRequest:
    """Which vectors to compute, and how."""

    prefixes: tuple[int, ...] = ()  # of the fused and the aligned vectors
    normalise: bool = False
    probabilities: bool = False
    weights: bool = False
    bf16: bool = False
    layers: Layers = ()  # inner layers of encoders

    @classmethod
    def of(cls, cfg: EmbedConfig, model: FusionModel) -> VectorRequest:
        """Check the settings against the model."""
        if cfg.probabilities and not model.classes:
            raise FusionZooError("--probabilities: the model was not trained on a class per sample")
        layers = read_setting(cfg.layer)
        check_layers(model, layers)
        if layers and cfg.compile:
            raise FusionZooError("--layer: a compiled model shows no inner layers: no --compile")
        return cls(
            prefixes=_prefixes(cfg, model),
            normalise=cfg.normalise,
            probabilities=cfg.probabilities,
            weights=cfg.weights,
            bf16=cfg.amp == "bf16",
            layers=layers,
        )


def _prefixes(cfg: EmbedConfig, model: FusionModel) -> tuple[int, ...]:
    """Check the sizes of prefixes against the widths of the vectors that are cut."""
    sizes = prefix_sizes(cfg.matryoshka)
    widest = max([model.fusion.dim, *model.spec.get("align", {}).values()])
    if sizes and sizes[-1] > widest:
        raise FusionZooError(f"--matryoshka {sizes[-1]}: the fused vector has {widest} entries")
    return tuple(sizes)


def untrained_prefixes(wanted: VectorRequest, model: FusionModel) -> list[int]:
    """Return the sizes of prefixes that the model was not trained for."""
    return sorted({*wanted.prefixes} - {*model.spec.get("matryoshka", [])})


def compute(model: FusionModel, batch: Batch, wanted: VectorRequest) -> dict[str, Tensor]:
    """Return float32 columns (B, D) by name, vectors first; an absent modality's rows are 0."""
    device = model.device.type
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=wanted.bf16):
        vectors, output, layers = _run(model, batch, wanted.layers)
    vectors = {name: x.float() for name, x in vectors.items()}
    cut = {
        f"{name}_{size}": x[:, :size] if name == "fused" else F.normalize(x[:, :size])
        for name, x in vectors.items()
        for size in wanted.prefixes
        if name in is_cut(model) and size <= x.shape[1]
    }
    vectors |= cut | layers
    if wanted.normalise:
        vectors = {name: F.normalize(x) for name, x in vectors.items()}
    if wanted.probabilities:
        vectors[PROBABILITIES] = output.logits.float().softmax(-1)
    if wanted.weights:
        if output.weights is None:
            raise FusionZooError(
                f"--weights: fusion {model.spec['fusion']['name']!r} computes no weight of each"
                " modality; `fusionzoo zoo info` says what a fusion computes"
            )
        vectors[WEIGHTS] = output.weights.float()
    return vectors


def _run(
    model: FusionModel, batch: Batch, layers: Layers
) -> tuple[dict[str, Tensor], FusionOutput, dict[str, Tensor]]:
    """Return vectors, the fusion's output, and vectors of inner layers."""
    if not layers:
        return *model.embed_and_answer(batch), {}
    with reading_layers(model, layers) as readers:
        vectors, output = model.embed_and_answer(batch)
        present = dict(zip(model.modalities, batch.present.unbind(1), strict=True))
        inner = {x.column: x.vectors(batch, present[x.modality]) for x in readers}
    return vectors, output, inner


def is_cut(model: FusionModel) -> set[str]:
    """Return the columns of which prefixes are written: fused and aligned vectors."""
    return {"fused", *(f"aligned_{name}" for name in model.align)}


def widths(model: FusionModel, wanted: VectorRequest) -> dict[str, int]:
    """Return the width of each column, measured with blank samples."""
    columns = compute(model, dummy_batch(model).to(model.device), wanted)
    return {name: x.shape[1] for name, x in columns.items()}


class InPieces:
    """Compute batches, after an error for lack of memory in smaller pieces.

    `rows` is the most that are computed at once, None before any error; `say` prints a message and
    `changed` is told each new `rows`.
    """

    def __init__(
        self,
        model: FusionModel,
        wanted: VectorRequest,
        rows: int | None = None,
        *,
        say: Callable[[str], None] = print,
        changed: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.model, self.wanted, self.rows = model, wanted, rows
        self.say, self.changed = say, changed

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        before = self.rows
        while (columns := self._try(batch)) is None:
            rows = min(self.rows or len(batch.ids), len(batch.ids))
            if rows == 1:
                raise FusionZooError(
                    f"out of memory with sample {batch.ids[0]!r} alone: cut long values (the"
                    " encoders' max_length), or use --device cpu"
                )
            self.rows = rows // 2
            if self.model.device.type in GPUS:
                getattr(torch, self.model.device.type).empty_cache()
        if self.rows is not None and self.rows != before:
            self.say(
                f"out of memory with {before or len(batch.ids)} samples: continuing with"
                f" {self.rows} at a time (--batch_size {self.rows} starts so)"
            )
            self.changed(self.rows)
        return columns

    def _try(self, batch: Batch) -> dict[str, Tensor] | None:
        """Return the columns, or None where memory does not suffice."""
        try:
            pieces = [compute(self.model, piece, self.wanted) for piece in self._pieces(batch)]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def _pieces(self, batch: Batch) -> Iterator[Batch]:
        if self.rows is None or len(batch.ids) <= self.rows:
            yield batch
            return
        for rows in torch.arange(len(batch.ids)).split(self.rows):
            yield batch.take(rows)


def model_digest(model: FusionModel) -> str:
    """Return the hash of a model's weights, settings and, of a plugin's components, code."""
    parts = [*model.encoders.values(), model.fusion]
    code = [code_digest(type(part)) for part in parts]
    return key_of([weights_hash(model), json.dumps(model.spec, sort_keys=True, default=str), code])


def parts_key(
    about: Mapping[str, Any], data: Mapping[str, str], cfg: EmbedConfig, device: torch.device
) -> dict[str, str]:
    """Return what parts must share to make one file: model, data by part, and settings, hashed."""
    names = ["row_group", "batch_size", "dtype", "normalise", "matryoshka", "probabilities"]
    names += ["layer", "weights", "amp", "compile", "split"]
    settings = {name: getattr(cfg, name) for name in names}
    settings |= {"format": FORMAT, "device": device.type}
    settings |= {name: about[name] for name in ("fusionzoo", "torch")}
    return {"model": str(about["model_digest"]), **data, "settings": key_of(settings)}


def describe(
    cfg: EmbedConfig,
    settings: Mapping[str, Any],
    model: FusionModel,
    dataset: PairedDataset,
    data: Mapping[str, str],
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """Return what a file says of itself, under the key `fusionzoo` of its metadata.

    `data` identifies the data set, see `identity.data_identity`.
    """
    unit = {name for name in widths if cfg.normalise or name.startswith("aligned_")}
    vectors = {
        name: {"width": width, "normalised": name in unit}
        for name, width in widths.items()
        if name not in (PROBABILITIES, WEIGHTS)
    }
    about: dict[str, Any] = {
        "model": cfg.model,
        "data": dict(settings),
        "split": cfg.split,
        "rows": len(dataset),
        "fusionzoo": __version__,
        "torch": str(torch.__version__),
        "model_digest": model_digest(model),
        "data_fingerprint": key_of(data),
        "modalities": model.modalities,
        "encoders": {name: encoder.spec for name, encoder in model.named_encoders()},
        "fusion": model.spec["fusion"],
        "vectors": vectors,
        "dtype": cfg.dtype,
        "amp": cfg.amp,
    }
    for modality, layer in read_setting(cfg.layer):
        about["vectors"][column_of(modality, layer)]["layer"] = layer
    if cfg.probabilities:
        about["classes"] = model.classes
    return json.loads(json.dumps(about, default=str))


def schema_of(
    widths: Mapping[str, int], modalities: Sequence[str], dtype: str, about: Mapping[str, Any]
) -> pa.Schema:
    """Return the columns of a file, and what it says of itself as metadata."""
    fields = [pa.field(name, pa.string()) for name in LABELS]
    fields += [pa.field(f"present_{name}", pa.bool_()) for name in modalities]
    fields.append(pa.field(READABLE, pa.bool_()))
    for name, width in widths.items():
        kind = "float32" if name in (PROBABILITIES, WEIGHTS) else dtype
        fields.append(pa.field(name, pa.list_(pa.type_for_alias(kind), width)))
    schema = pa.schema(fields)
    repeated = [name for name in schema.names if schema.names.count(name) > 1]
    if repeated:
        raise FusionZooError(
            f"two columns of the file would be named {repeated[0]!r}: give the modality another"
            " name (--data.columns)"
        )
    return schema.with_metadata({"fusionzoo": json.dumps(about)})


def table_of(
    schema: pa.Schema,
    dataset: PairedDataset,
    present: np.ndarray[Any, Any],
    columns: Mapping[str, np.ndarray[Any, Any]],
) -> pa.Table:
    """Build the rows of a data set: present (N, M), each column (N, D) float32."""
    readable = present.any(1)
    arrays: dict[str, Any] = {n: pc.cast(dataset.chosen(n), pa.string()) for n in LABELS}
    flags = [name for name in schema.names if name.startswith("present_")]
    for name, column in zip(flags, present.T, strict=False):
        arrays[name] = pa.array(column)
    arrays[READABLE] = pa.array(readable)
    unreadable = None if readable.all() else pa.array(~readable)
    for name, values in columns.items():
        kind = schema.field(name).type
        flat = pa.array(np.ascontiguousarray(values, kind.value_type.to_pandas_dtype()).ravel())
        arrays[name] = pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=unreadable)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """An extraction with its settings resolved: what to compute of which rows."""

    model: FusionModel
    dataset: PairedDataset
    plan: ExtractionPlan
    wanted: VectorRequest
    schema: pa.Schema
    key: dict[str, str]  # what parts on disk must share
    num_workers: int

    @classmethod
    def of(
        cls,
        cfg: EmbedConfig,
        settings: dict[str, Any],
        model: FusionModel,
        dataset: PairedDataset,
        num_workers: int,
    ) -> Extraction:
        """Resolve the settings of a model on its device and an open data set."""
        wanted = VectorRequest.of(cfg, model)
        columns = widths(model, wanted)
        data = data_identity(dataset)
        about = describe(cfg, settings, model, dataset, data, columns)
        schema = schema_of(columns, list(model.modalities), cfg.dtype, about)
        key = parts_key(about, data, cfg, model.device)
        if cfg.compile:
            save_memory_and_compile(model, TrainConfig(compile=True))
        return cls(
            model=model,
            dataset=dataset,
            plan=ExtractionPlan(dataset.lengths(), cfg.row_group, cfg.batch_size),
            wanted=wanted,
            schema=schema,
            key=key,
            num_workers=num_workers,
        )


def extract(
    job: Extraction,
    parts: PartsFolder,
    numbers: Sequence[int],
    *,
    advance: Callable[[int], Any] = lambda rows: None,
    say: Callable[[str], None] = print,
) -> None:
    """Compute some parts and write each as soon as it is complete.

    `advance` is told the rows of each batch.
    """
    numbers = job.plan.longest_first(numbers)
    rows, note = parts.most_rows, parts.note_most_rows
    in_pieces = InPieces(job.model, job.wanted, rows, say=say, changed=note)
    with evaluating(job.model), WritingThread(parts) as writing:
        collected: list[_Computed] = []
        for planned, batch in _batches(job, numbers, say):
            if batch.ids:  # none where the data set skips all of them
                columns = in_pieces(batch.to(job.model.device))
                positions = _positions(job.dataset, planned.rows, batch)
                collected.append((positions, batch.present.cpu(), columns))
            advance(len(planned.rows))
            if planned.is_last:
                of_part = job.plan.rows(planned.part)
                writing.add(planned.part, partial(_table, job, of_part, *_joined(collected)))
                collected = []


def _batches(
    job: Extraction, numbers: Sequence[int], say: Callable[[str], None]
) -> Iterator[tuple[PlannedBatch, Batch]]:
    """Yield each planned batch with what was loaded for it."""
    keys = ([(row, 0) for row in planned.rows.tolist()] for planned in job.plan.batches(numbers))
    reads_layers = bool(job.wanted.layers)  # which no stored features have
    stored = FrozenFeatures({}, []) if reads_layers else stored_features(job.model, job.dataset)
    for note in stored.notes:
        say(note)
    view, collate = stored.view(job.dataset), stored.collate(job.model.collate())
    workers, device = job.num_workers, job.model.device
    loader = make_loader(view, keys, collate, num_workers=workers, device=device)
    yield from zip(job.plan.batches(numbers), loader, strict=True)


def _positions(dataset: PairedDataset, rows: Tensor, batch: Batch) -> Tensor:
    """Return the positions in the data set of a batch's rows; a skipped one is not among them."""
    if len(batch.ids) == len(rows):
        return rows
    position = dict(zip(dataset.subset(rows).ids, rows.tolist(), strict=True))
    return torch.tensor([position[sample_id] for sample_id in batch.ids])


def _joined(batches: Sequence[_Computed]) -> _Computed:
    """Join the batches of a part; columns are on the device until then: copying would wait."""
    if not batches:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.bool), {}
    positions, present, columns = zip(*batches, strict=True)
    joined = {name: torch.cat([x[name] for x in columns]).cpu() for name in columns[0]}
    return torch.cat(positions), torch.cat(present), joined


def _table(
    job: Extraction, rows: range, positions: Tensor, present: Tensor, columns: dict[str, Tensor]
) -> pa.Table:
    """Put a part's rows in the table's order; those that were not computed are all zero."""
    index = (positions - rows.start).numpy()
    if not all(x.isfinite().all() for x in columns.values()):
        check_finite(*columns.values(), ids=job.dataset.subset(positions).ids)

    def place(values: Tensor | None, width: int, dtype: Any) -> np.ndarray[Any, Any]:
        ordered = np.zeros((len(rows), width), dtype)
        if values is not None and len(index):
            ordered[index] = values.numpy()
        return ordered

    vectors = {
        name: place(columns.get(name), job.schema.field(name).type.list_size, np.float32)
        for name in job.schema.names
        if pa.types.is_fixed_size_list(job.schema.field(name).type)
    }
    flags = place(present, len(job.model.modalities), np.bool_)
    return table_of(job.schema, job.dataset.subset(rows), flags, vectors)
