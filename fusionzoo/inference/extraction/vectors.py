"""Compute what is written of a batch: vectors and, if requested, probabilities and weights.

Shapes: `B` batch, `M` modalities, `D` width, `K` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.config import EmbedConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch
from fusionzoo.training.balance._prefixes import prefix_sizes
from fusionzoo.training.objective import dummy_batch

PROBABILITIES, WEIGHTS = "probabilities", "weights"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which vectors to compute, and how."""

    prefixes: tuple[int, ...] = ()  # of the fused and the aligned vectors
    normalise: bool = False
    probabilities: bool = False
    weights: bool = False
    bf16: bool = False

    @classmethod
    def of(cls, cfg: EmbedConfig, model: FusionModel) -> Wanted:
        """Check the settings against the model."""
        if cfg.probabilities and not model.classes:
            raise FusionZooError("--probabilities: the model was not trained on a class per sample")
        return cls(
            prefixes=_prefixes(cfg, model),
            normalise=cfg.normalise,
            probabilities=cfg.probabilities,
            weights=cfg.weights,
            bf16=cfg.amp == "bf16",
        )


def _prefixes(cfg: EmbedConfig, model: FusionModel) -> tuple[int, ...]:
    """Check the sizes of prefixes against the widths of the vectors that are cut."""
    sizes = prefix_sizes(cfg.matryoshka)
    widest = max([model.fusion.dim, *model.spec.get("align", {}).values()])
    if sizes and sizes[-1] > widest:
        raise FusionZooError(f"--matryoshka {sizes[-1]}: the fused vector has {widest} entries")
    return tuple(sizes)


def untrained_prefixes(wanted: Wanted, model: FusionModel) -> list[int]:
    """Return the sizes of prefixes that the model was not trained for."""
    return sorted({*wanted.prefixes} - {*model.spec.get("matryoshka", [])})


def compute(model: FusionModel, batch: Batch, wanted: Wanted) -> dict[str, Tensor]:
    """Return float32 columns (B, D) by name, vectors first; an absent modality's rows are 0."""
    device = model.device.type
    with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=wanted.bf16):
        vectors, output = model.embed_and_answer(batch)
    vectors = {name: x.float() for name, x in vectors.items()}
    cut = {
        f"{name}_{size}": _cut(x, size, is_unit=name != "fused")
        for name, x in vectors.items()
        for size in wanted.prefixes
        if name in is_cut(model) and size <= x.shape[1]
    }
    vectors |= cut
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


def is_cut(model: FusionModel) -> set[str]:
    """Return the columns of which prefixes are written: fused and aligned vectors."""
    return {"fused", *(f"aligned_{name}" for name in model.align)}


def _cut(vectors: Tensor, size: int, *, is_unit: bool) -> Tensor:
    short = vectors[:, :size]
    return F.normalize(short) if is_unit else short


def widths(model: FusionModel, wanted: Wanted) -> dict[str, int]:
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
        wanted: Wanted,
        rows: int | None = None,
        *,
        say: Callable[[str], None] = print,
        changed: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.model, self.wanted, self.rows = model, wanted, rows
        self.say, self.changed = say, changed

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        before = self.rows
        while True:
            columns = self._try(batch)
            if columns is not None:
                break
            rows = min(self.rows or len(batch.ids), len(batch.ids))
            if rows == 1:
                raise FusionZooError(
                    f"out of memory with sample {batch.ids[0]!r} alone: cut long values (the"
                    " encoders' max_length), or use --device cpu"
                )
            self.rows = rows // 2
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
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


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is for lack of memory, on a GPU or in torch's allocator on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
