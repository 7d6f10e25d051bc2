"""What is searched for: which column of vectors answers, and the vector of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.embeddings.extract import model_digest
from fusionzoo.errors import FusionZooError, check_known
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.loading import load

from .vectors import ALIGNED, VectorFile, unit

FUSED = "fused"


def choose_column(file: VectorFile, by: str, modalities: Sequence[str]) -> str:
    """Return the column to search: `by`, else aligned vectors for a query by media, else fused."""
    if by:
        file.check_column(by)
        return by
    if modalities and ALIGNED in file.dims:
        return ALIGNED
    if FUSED in file.dims:
        return FUSED
    raise FusionZooError(f"{file.path} has no fused vectors: --by {' | '.join(file.dims)}")


def open_model(file: VectorFile, model: FusionModel | str, plugins: Any = ()) -> FusionModel:
    """Load the model that embedded the file, and check that it is the same one."""
    if isinstance(model, FusionModel):
        check_model(file, model, "the model")
        return model
    folder = model or str(file.metadata.get("model") or "")
    if not folder or not Path(folder).is_dir():
        known = f"was embedded by {folder}, which is not there" if folder else "names no model"
        raise FusionZooError(f"{file.path} {known}: --model says where it is")
    loaded = load(folder, plugins=plugins)
    check_model(file, loaded, folder)
    return loaded


def check_model(file: VectorFile, model: FusionModel, name: str) -> None:
    """Raise if the file records the digest of another model."""
    recorded = file.metadata.get("model_digest")
    if recorded and (digest := model_digest(model)) != recorded:
        raise FusionZooError(
            f"{name} is not the model that embedded {file.path} (digest {digest[:12]}, not"
            f" {str(recorded)[:12]}): embed the data again, or name the model with --model"
        )


def name_modalities(model: FusionModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """Map kinds (`text`, `image`, `audio`) to the model's modalities; names stay as they are."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        known = model.modalities
        of_kind = [key] if key in known else [name for name, kind in known.items() if kind == key]
        if len(of_kind) > 1:
            raise FusionZooError(
                f"the model has several modalities of {key}: --query.<name> with one of"
                f" {', '.join(of_kind)}"
            )
        if not of_kind:
            check_known(key, known, f"the model has no modality {key!r}", "It reads")
        named[of_kind[0]] = value
    return named


def embed_query(model: FusionModel, values: Mapping[str, Any], column: str) -> Tensor:
    """Return the unit vector (D,) of a query, `{modality: value}`, in the space of a column."""
    vectors = {name: x[0].cpu() for name, x in model.embed([values]).items()}
    return query_vector(model, vectors, list(values), column)


def query_vector(
    model: FusionModel, vectors: Mapping[str, Tensor], names: Sequence[str], column: str
) -> Tensor:
    """Return the unit vector (D,) of a sample with the modalities `names`, of what `embed` says."""
    if column == FUSED:
        return unit(vectors[FUSED])
    if column.partition("_")[0] == ALIGNED and column not in model.modalities:
        aligned = [f"{ALIGNED}_{name}" for name in names]
        absent = [name for name in aligned if name not in vectors]
        if absent:
            raise FusionZooError(
                f"the model has no aligned vectors of {absent[0].removeprefix(f'{ALIGNED}_')}: it"
                " was trained without --balance contrastive_align; use --by fused"
            )
        return unit(torch.stack([unit(vectors[name]) for name in aligned]).mean(0))
    if list(names) != [column]:
        raise FusionZooError(
            f"--by {column} compares vectors of {column} alone: the query must have {column} and"
            f" nothing else, and it has {', '.join(names)}"
        )
    return unit(vectors[column])


def check_fit(file: VectorFile, column: str, query: Tensor, origin: str) -> None:
    """Raise if a query's vectors (Q, D) are no vectors of the column's space."""
    dim = file.dims[column]
    if query.ndim != 2 or query.shape[1] != dim:
        raise FusionZooError(
            f"{file.path}: {column!r} has vectors of {dim} numbers, and {origin} gives"
            f" {query.shape[-1] if query.ndim else 1}: search with the model that embedded the file"
        )
    if not query.isfinite().all() or (query == 0).all(1).any():
        raise FusionZooError(f"{origin}: the vector to search for has no direction (zeros or NaN)")


def normalised(file: VectorFile, column: str) -> bool | None:
    """Return whether the file says that a column's vectors have length 1; None: it does not say."""
    about = file.metadata.get("vectors")
    facts = about.get(column) if isinstance(about, Mapping) else None
    return facts.get("normalised") if isinstance(facts, Mapping) else None


def check_same_space(file: VectorFile, other: VectorFile, column: str) -> None:
    """Raise if two files' vectors were not made by the same model in the same way."""
    other.check_column(column)
    pairs = {
        "model digest": (other.metadata.get("model_digest"), file.metadata.get("model_digest")),
        "width": (other.dims[column], file.dims[column]),
        "normalised": (normalised(other, column), normalised(file, column)),
    }
    for name, (theirs, here) in pairs.items():
        if theirs != here and None not in (theirs, here):
            raise FusionZooError(
                f"{other.path} does not fit {file.path}: the {name} of {column!r} is {theirs!r}"
                f" there and {here!r} here"
            )
