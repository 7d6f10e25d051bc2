"""Answer raw samples by an exported folder: the graph, ONNX Runtime, and no model of torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import pyarrow as pa
import torch
from torch import Tensor

from fusionzoo.config import PredictConfig
from fusionzoo.datasets import Collate, PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.datasets.loader import make_loader
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import read_json_object
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.ground.progress import progress_bar
from fusionzoo.machine.graphs import open_session, require_onnx, run_session
from fusionzoo.model import loading
from fusionzoo.model.answering import Answering
from fusionzoo.model.confidence import Calibration
from fusionzoo.model.folder import check_listed
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.trained_on import TrainedOn, as_trained
from fusionzoo.structures import Batch, check_finite
from fusionzoo.targets import from_spec

from .graph import Inputs, by_name, plain_inputs
from .preprocess import build

FORMAT = 4  # of an exported folder
MODEL = "model.onnx"
PREPROCESS, LABELS = "preprocess.json", "labels.json"


class OnnxModel(Answering):
    """An exported model: `predict` and `embed` raw samples as `FusionModel` does.

    Rows of one length are run together where an encoder needs that.
    """

    def __init__(self, folder: str | Path, *, threads: int = 0) -> None:
        require_onnx()
        self.folder = Path(folder)
        if not (self.folder / PREPROCESS).is_file():
            raise FusionZooError(
                f"{self.folder} is no exported folder: it holds no {PREPROCESS}; write one with"
                " fusionzoo export MODEL --out FOLDER"
            )
        check_listed(self.folder)
        about, labels = (read_json_object(self.folder / x) for x in (PREPROCESS, LABELS))
        for contents, name in ((about, PREPROCESS), (labels, LABELS)):
            if contents.get("format") != FORMAT:
                raise FusionZooError(
                    f"{self.folder / name}: format {contents.get('format')!r}; this version of"
                    f" fusionzoo reads {FORMAT}"
                )
        self._collate: Collate | None = None
        with explained(f"{self.folder} is no whole export, export the model again"):
            self._describe(about, labels)
            self._open(threads)
            self._check_answers()

    def _describe(self, about: Mapping[str, Any], labels: Mapping[str, Any]) -> None:
        self._kinds = {name: x["kind"] for name, x in about["modalities"].items()}
        self.classes = labels["classes"]
        specs = labels["targets"]
        self.targets = None if specs is None else [from_spec(x["spec"]) for x in specs]
        self.trained_on = TrainedOn.load(self.folder)
        # The graph divides by the temperatures.
        self.calibration = Calibration.load(self.folder, self.answer_targets)
        self._one_length = [n for n, x in about["modalities"].items() if x["one_length"]]
        self._described = {name: x["processor"] for name, x in about["modalities"].items()}

    def _open(self, threads: int) -> None:
        if not (self.folder / MODEL).is_file():
            raise FusionZooError(f"{self.folder} holds no {MODEL}: export it with --format onnx")
        # Of bytes no weights beside the file are read, which no digest would hold.
        self._session = open_session((self.folder / MODEL).read_bytes(), threads)
        self.outputs = [one.name for one in self._session.get_outputs()]

    def _check_answers(self) -> None:
        """Raise an error where the graph answers more or less than labels.json names."""
        named = self.classes if self.targets is None else range(sum(x.width for x in self.targets))
        shapes = {one.name: one.shape for one in self._session.get_outputs()}
        if len({*named}) != len(named) or (named and shapes["logits"][-1] != len(named)):
            raise FusionZooError(
                f"{LABELS} has {len({*named})} answers, the graph {shapes['logits']}"
            )

    @property
    def modalities(self) -> Mapping[str, str]:
        return self._kinds

    def collate(self) -> Collate:
        """Return the function that turns a list of samples into the graph's batch."""
        if self._collate is None:
            processors = {n: build(x, self.folder, n) for n, x in self._described.items()}
            columns = None
            if self.targets is not None:
                columns = sum(target.columns for target in self.targets)
            self._collate = Collate(processors, columns)
        return self._collate

    def run(self, present: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        """Run the graph on prepared inputs: {output: (B, ...)}.

        Args:
            present: which modalities each row has, bool (B, M)
            inputs: modality -> its inputs by name, as preprocess.json says
        """
        parts = []
        for rows in self._groups(present, inputs):
            named = by_name(present[rows], _take(inputs, rows, self._one_length))
            parts.append((rows, run_session(self._session, named)))
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return {
            name: torch.cat([answers[number] for _, answers in parts])[order]
            for number, name in enumerate(self.outputs)
        }

    def _groups(self, present: Tensor, inputs: Inputs) -> Iterator[Tensor]:
        """Yield the rows that may run together."""
        lengths = [
            inputs[name]["lengths"].masked_fill(~present[:, column], 0)
            for column, name in enumerate(self.modalities)
            if name in self._one_length and "lengths" in inputs[name]
        ]
        if not lengths:
            yield torch.arange(len(present))
            return
        kinds = torch.stack(lengths, dim=1).unique(dim=0, return_inverse=True)[1]
        for kind in kinds.unique():
            yield (kinds == kind).nonzero()[:, 0]

    def answer(self, batch: Batch) -> dict[str, Tensor]:
        """Run the graph on a batch."""
        return self.run(batch.present, plain_inputs(self.modalities, batch))

    def embed(self, samples: Batch | Sequence[Any]) -> dict[str, Tensor]:
        """Return `fused` (B, dim) and, after contrastive training, `aligned_<modality>`."""
        outputs = self.answer(self._batch(samples))
        vectors = {k: x for k, x in outputs.items() if k == "fused" or k.startswith("aligned_")}
        check_finite(*vectors.values())
        return vectors

    def predict(self, samples: Batch | Sequence[Any]) -> list[Any]:
        """Answer raw samples as `FusionModel.predict` does: a `Prediction`, labels or numbers."""
        if not (self.classes or self.targets):
            raise FusionZooError("this model was trained without a target: it can only embed")
        answers = self.decode(self.answer(self._batch(samples))["logits"])
        return [as_trained(answer, self.types_of_labels) for answer in answers]

    def _batch(self, samples: Batch | Sequence[Any]) -> Batch:
        if isinstance(samples, Batch):
            return samples
        rows = self.open_samples(samples)
        batch: Batch = self.collate()([rows[row] for row in range(len(rows))])
        return batch


@overload
def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    plugins: str | Sequence[str] = (),
    encoders: Mapping[str, Encoder] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> FusionModel: ...


@overload
def load(folder: str | Path, *, runtime: Literal["onnx"], threads: int = 0) -> OnnxModel: ...


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    *,
    runtime: Literal["torch", "onnx"] = "torch",
    **options: Any,
) -> FusionModel | OnnxModel:
    """Load a model folder, the model of a run folder, or `"owner/name"` of the Hugging Face Hub.

    Args:
        folder: a model folder, a run folder or a repository; with `runtime="onnx"` an exported one
        device: of the weights
        runtime: `onnx` answers by ONNX Runtime on the CPU: `predict` and `embed` of raw samples
        options: `plugins`, files and modules to import first, of a model whose encoders or fusion
            are not fusionzoo's own (what the folder itself names is never imported); `encoders`,
            those that no folder can hold: modules of `wrap_encoder`, into which the weights are
            then read; of a repository `revision` and `token`. With `runtime="onnx"`: `threads`,
            0 = as many as ONNX Runtime takes
    """
    if runtime == "onnx":
        return OnnxModel(folder, **options)
    if runtime != "torch":
        raise FusionZooError(f"runtime={runtime!r} is neither 'torch' nor 'onnx'")
    return loading.load(folder, device, **options)


def predict(cfg: PredictConfig) -> Path | pa.Table:
    """Predict every sample of a data set by an exported folder, see `fusionzoo.predict`."""
    from fusionzoo.inference import open_to_predict, prediction_tables, write_tables

    if cfg.device not in ("auto", "cpu"):
        raise FusionZooError(
            f"--device {cfg.device}: {cfg.model} was exported and runs on the CPU; a model folder"
            " takes other devices"
        )
    load_plugins(cfg.plugins)
    model, dataset = open_to_predict(cfg, OnnxModel(cfg.model), None)
    return write_tables(cfg, prediction_tables(model, dataset, cfg, _answered(model, dataset, cfg)))


def _answered(
    model: OnnxModel, dataset: PairedDataset, cfg: PredictConfig
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield every batch and its logits (B, K), in the data's order."""
    from fusionzoo.inference import warn_of_failures

    sampler = PairedBatchSampler(make_sampler(dataset, shuffle=False, pad=False), cfg.batch_size)
    loader = make_loader(dataset, sampler, model.collate(), num_workers=cfg.num_workers or 0)
    for batch in progress_bar(loader, desc="predict", unit="batch"):
        yield batch, model.answer(batch)["logits"]
    warn_of_failures(dataset)


def _take(inputs: Inputs, rows: Tensor, one_length: Sequence[str]) -> Inputs:
    """Return some rows, without their padding where all are of one length."""
    taken = {m: {name: x[rows] for name, x in tensors.items()} for m, tensors in inputs.items()}
    for modality in one_length:
        tensors = taken[modality]
        if "lengths" not in tensors:
            continue
        longest = max(1, int(tensors["lengths"].max()))
        taken[modality] = {n: x[:, :longest] if x.ndim > 1 else x for n, x in tensors.items()}
    return taken
