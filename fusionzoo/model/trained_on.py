"""What a model was trained on, stored with it: the data's settings, short hashes of the ids, and
what the run measured.

`trained_on.safetensors` in the model folder is optional: without it, whether a model has seen a
sample is not known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.tables.provenance import MANY_OF, TYPES
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.files import replacing_tensors, without_folders
from fusionzoo.ground.cells import category_of, read_cell
from fusionzoo.structures import Labels, Prediction

NAME = "trained_on.safetensors"
SEEN = "seen_in_training"  # key of counts by split, and column of predictions
CONTENTS = "contents"  # what the hashes are of, if the ids were the rows' numbers
SPLITS = ("train", "val")  # validation chooses the epoch, so its samples are no longer new either
NO_PATHS = (  # settings whose words are those of the table: a name, a sign, a word for a gap
    *("columns", "kinds", "na", "label_separator", "delimiter", "decimal", "group_column"),
    *("weight_column", "time_column", "on", "fields", "sheet", "positive"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Metrics of the fusion given some modalities, on the test samples that have one of them."""

    given: list[str]
    samples: int
    metrics: dict[str, list[float]]  # name -> [value], or [value, low, high], a 95 % interval


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """What a finished run measured, for the model card."""

    fingerprint: str  # of the data's ids, splits, labels and values
    samples: dict[str, int]  # split -> number
    best_epoch: int  # whose weights were kept; the latest, of several seeds
    titles: dict[str, str]  # metric -> what tables call it
    rows: list[Row]  # of the test split; first the one given all modalities
    seeds: int = 1  # models that were joined
    select: str = "best_val"  # how that epoch was chosen, as `--train.select`


@dataclass(frozen=True, kw_only=True)
class TrainedOn:
    """The data of a training run."""

    settings: Mapping[str, Any]  # of the data set, as `--data` has them
    ids: Mapping[str, Tensor] = field(default_factory=dict)  # split -> hashes, int64 (N,)
    numbered: bool = False  # whether ids were the rows' numbers: the hashes are of the contents
    results: RunResults | None = None  # None: not known
    types: Mapping[str, str] = field(default_factory=dict)  # target -> what labels came as

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        splits: Mapping[str, PairedDataset],
        results: RunResults | None = None,
    ) -> TrainedOn:
        """Hash the ids of the splits that training and validation read."""
        seen = {name: splits[name] for name in SPLITS if name in splits}
        hashes = {name: hash_ids(split) for name, split in seen.items()}
        known = {name: x.sort().values for name, x in hashes.items() if x is not None}
        numbered = any(split.provenance.numbered for split in seen.values())
        came_as = splits["train"].provenance.types if "train" in splits else {}
        types = {name: kind for name, kind in came_as.items() if name != "id"}
        return cls(settings=settings, ids=known, numbered=numbered, results=results, types=types)

    def without_folders(self) -> TrainedOn:
        """Return the same with paths of this machine cut to their last part, for others to read."""
        return replace(self, settings=_public(self.settings))

    def save(self, folder: Path) -> None:
        """Write the file into a model folder."""
        from safetensors.torch import save_file

        with replacing_tensors(folder / NAME) as partial:
            metadata = {"data": json.dumps(dict(self.settings), default=str)}
            if self.numbered:
                metadata["hashes"] = CONTENTS
            if self.types:
                metadata["types"] = json.dumps(dict(self.types))
            if self.results is not None:
                metadata["results"] = json.dumps(asdict(self.results))
            save_file(dict(self.ids), str(partial), metadata)

    @classmethod
    def load(cls, folder: Path) -> TrainedOn | None:
        """Read the file of a model folder; None if there is none."""
        from pydantic import TypeAdapter
        from safetensors import safe_open

        if not (folder / NAME).is_file():
            return None
        try:
            with safe_open(str(folder / NAME), "pt") as file:
                metadata = file.metadata()
                settings, results = json.loads(metadata["data"]), metadata.get("results")
                numbered = metadata.get("hashes") == CONTENTS
                types = json.loads(metadata.get("types", "{}"))
                ids = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if not isinstance(settings, dict) or not {*ids} <= {*SPLITS}:
                raise ValueError("it must hold settings of data, and ids of train and val")
            if not {str(x).removeprefix(MANY_OF) for x in dict(types).values()} <= {*TYPES}:
                raise ValueError(f"types of labels are {', '.join(TYPES)}, and lists of them")
            if any(x.ndim != 1 or x.dtype != torch.int64 for x in ids.values()):
                raise ValueError("ids must be int64, of one dimension")
            known = None if results is None else TypeAdapter(RunResults).validate_json(results)
        except Exception as error:
            raise FusionZooError(f"{folder / NAME} cannot be read: {one_line(error)}") from error
        return cls(settings=settings, ids=ids, numbered=numbered, results=known, types=types)


def as_trained(answer: Any, types: Mapping[str, str]) -> Any:
    """Return what `model.decode` answers of a sample, with labels of the types that they had in the
    training data; of a single target the answer alone, whatever its column is called."""
    by_target = answer if isinstance(answer, dict) else {"target": answer}
    typed = {name: _as_trained(x, types.get(name, "")) for name, x in by_target.items()}
    return typed if len(typed) > 1 else typed[next(iter(typed))]


def _as_trained(answer: Any, kind: str) -> Any:
    read = TYPES[kind.removeprefix(MANY_OF)]
    if not isinstance(answer, Prediction | Labels):
        return answer
    shares = {read(label): share for label, share in answer.probabilities.items()}
    if isinstance(answer, Labels):
        return Labels([read(label) for label in answer.labels], shares)
    return Prediction(read(answer.label), answer.probability, shares)


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: item if key in NO_PATHS else _public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    return without_folders(str(value)) if isinstance(value, str | Path) else value


def count_seen(
    trained_on: TrainedOn | None, dataset: PairedDataset, modalities: Sequence[str] | None = None
) -> dict[str, int | None]:
    """Return how many samples are among those trained and validated on; None: not known."""
    rows = seen_rows(trained_on, dataset, modalities)
    return {name: None if x is None else int(x.sum()) for name, x in rows.items()}


def seen_rows(
    trained_on: TrainedOn | None, dataset: PairedDataset, modalities: Sequence[str] | None = None
) -> dict[str, Tensor | None]:
    """Return which samples have ids of those trained and validated on, (N,); None: not known.

    Samples that have but the numbers of their rows are compared by contents, of all `modalities`.
    """
    numbered = dataset.provenance.numbered
    lacks = numbered and not {*(modalities or ())} <= {*dataset.modalities}
    comparable = trained_on is not None and trained_on.numbered == numbered and not lacks
    hashes = hash_ids(dataset) if comparable else None
    known = {} if trained_on is None else trained_on.ids
    return {
        name: torch.isin(hashes, known[name]) if name in known and hashes is not None else None
        for name in SPLITS
    }


def hash_ids(dataset: PairedDataset) -> Tensor | None:
    """Return 64 bits of each id's hash, int64 (N,); of ids that are but the rows' numbers, of the
    contents: texts, cells of a table and paths as they stand.

    None if those are not in the table, but arrays in memory or members of shards.
    """
    names: Sequence[str] = dataset.table_ids
    if dataset.provenance.numbered:
        if {*dataset.modalities} & dataset.memory.keys():
            return None
        columns = [
            [_plain(cell) for cell in dataset.chosen(name).to_pylist()]
            for name in sorted(dataset.modalities)
        ]
        names = [json.dumps(row, default=str) for row in zip(*columns, strict=True)]
    return hash_texts(names)


def hash_texts(texts: Sequence[str]) -> Tensor:
    """Return 64 bits of each text's hash, int64 (N,)."""
    hashes = [hashlib.blake2b(str(x).encode(), digest_size=8) for x in texts]
    values = [int.from_bytes(x.digest(), "little", signed=True) for x in hashes]
    return torch.tensor(values, dtype=torch.int64)


def _plain(value: Any) -> Any:
    """Return a cell so that one value has one form in all formats, see `category_of`."""
    if isinstance(value, Mapping):
        return {name: _plain(cell) for name, cell in sorted(value.items()) if cell is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    cell = read_cell(value)
    return None if cell is None else category_of(cell)
