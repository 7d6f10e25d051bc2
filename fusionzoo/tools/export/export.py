"""`fusionzoo export`: a folder with a model's graph that runs without fusionzoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config.flags import Tree
from fusionzoo.config.load import run_command
from fusionzoo.config.schema import Count, option
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing_folder, write_json
from fusionzoo.graphs import quiet, require_onnx
from fusionzoo.inference import data_settings_of
from fusionzoo.inputs.data import open_dataset
from fusionzoo.loading import load
from fusionzoo.model import FusionModel
from fusionzoo.model_folder import NAME as DIGESTS
from fusionzoo.model_folder import write_digests
from fusionzoo.progress import progress_bar

from .folder import write_example, write_labels, write_preprocess
from .graph import check, onnx_runner, trace, trace_parts
from .int8 import SAME, Int8Cost, cost, quantise
from .runtime import FUSION, INT8, MODEL, OnnxModel
from .web import check_web, fetch_packages, page_template, write_page

PROGRAM = "model.pt2"
HELP = """
Write a model for other runtimes: `fusionzoo export runs/a --format onnx --out exported`.

The folder holds the graph, preprocess.json, labels.json, digests and an example script that needs
no fusionzoo. The graph is compared with the model at other numbers of rows, other lengths and every
subset of modalities; one that differs is not written. Needs `fusionzoo[onnx]` for ONNX.
"""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of `fusionzoo export`."""

    model: str = option("", "a run folder or a model folder (required)")
    out: str = option("", "folder to write; default: `exported` beside the model")
    format: Literal["onnx", "torch-export"] = option("onnx", "of the graph")
    int8: bool = option(False, "also a model with weights of one byte, compared on data")
    split: bool = option(False, "a graph for each encoder, and one for the fusion")
    web: str = option("", "also a static page that answers in the browser: folder to write")
    npm_packages: str = option("", "a node_modules with what the page needs; default: by npm")
    data: Tree = option({}, "data to compare int8 on; default: what the model was validated on")
    data_split: str = option("val", "of that data: train | val | test | all")
    samples: Count = option(512, "samples of it at most")
    plugins: str | list[str] = option("", "files or modules with components of your own")


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    difference: float  # from the model's answers, over max(1, the largest value)
    int8: Int8Cost | None


def export_command(args: Sequence[str]) -> int:
    """Run `fusionzoo export MODEL ...`; return its exit code."""
    words = list(args)
    if words and not words[0].startswith("-"):
        words = ["--model", *words]
    return run_command(ExportConfig, HELP, words, _export)


def _export(cfg: ExportConfig) -> int:
    if not cfg.model:
        raise FusionZooError("say what to export: fusionzoo export runs/a")
    model = load(cfg.model, plugins=cfg.plugins)
    dataset = open_validation(cfg, model) if cfg.int8 else None
    out = Path(cfg.out) if cfg.out else Path(cfg.model) / "exported"
    web, packages = cfg.web or None, cfg.npm_packages or None
    written = export(
        model,
        out,
        format=cfg.format,
        split=cfg.split,
        int8_on=dataset,
        web=web,
        npm_packages=packages,
    )
    size = sum(x.stat().st_size for x in written.folder.rglob("*") if x.is_file())
    print(f"wrote   {written.folder}, {size / 1e6:,.1f} MB")
    print(
        f"equal   to {written.difference:.1g} on every subset of modalities, at other numbers of"
        " rows and lengths"
    )
    if written.int8 is not None:
        _print_cost(written.int8)
    if (written.folder / "example.py").is_file():
        print(f"next    python {written.folder / 'example.py'} {_arguments(model)}")
    if web:
        print(f"page    python -m http.server --directory {web}    (any server of static files)")
    return 0


def _arguments(model: FusionModel) -> str:
    words = {"image": "=cat.png", "text": '="a cat"', "audio": "=cat.ogg"}
    return " ".join(f"{name}{words.get(kind, '=...')}" for name, kind in model.modalities.items())


def _print_cost(loss: Int8Cost) -> None:
    same = loss.same
    print(
        f"int8    {same['mean']:.1%} [{same['low']:.1%}, {same['high']:.1%}] the same answers on"
        f" {loss.samples} samples, {loss.bytes['int8'] / loss.bytes['float32']:.2f} of the size"
    )
    if loss.accuracy is not None:
        change = loss.accuracy["difference"]
        print(
            f"        accuracy {100 * change['mean']:+.1f} points"
            f" [{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
        )


def open_validation(cfg: ExportConfig, model: FusionModel) -> PairedDataset:
    """Open the data on which int8 is compared with the model."""
    settings = data_settings_of(cfg.data, cfg.model, model.trained_on)
    targets = {target.name: target.kind for target in model.targets or ()}
    dataset = open_dataset(settings.to_open, targets or None)
    dataset = dataset if cfg.data_split == "all" else dataset.split(cfg.data_split)
    step = max(1, len(dataset) // cfg.samples)
    return dataset.subset(list(range(0, len(dataset), step))[: cfg.samples])


def export(
    model: FusionModel,
    out: str | Path,
    *,
    format: Literal["onnx", "torch-export"] = "onnx",
    split: bool = False,
    int8_on: PairedDataset | None = None,
    web: str | Path | None = None,
    npm_packages: str | Path | None = None,
) -> Exported:
    """Write a model's graph with what it needs into a folder, which must be new or empty.

    Args:
        model: in evaluation mode, on the CPU
        out: the folder
        format: `onnx`, or `torch-export` for `torch.export.load` in Python and C++
        split: a graph for each encoder, so that an absent modality costs nothing and features can
            be computed before, and one for the fusion; ONNX only
        int8_on: also write a model with weights of one byte, if at least 97 % of the answers on
            these samples stay the same; ONNX only
        web: also write a folder with a static page that answers in the browser, from the whole
            float32 model; ONNX only
        npm_packages: a folder `node_modules` with the packages that the page needs; default: npm
            fetches them, once, into the cache

    Raises:
        FusionZooError: the graph differs from the model, or an operation has no counterpart;
            nothing is written then
    """
    if format == "onnx":
        require_onnx()
    elif split or int8_on is not None or web is not None:
        raise FusionZooError("--split, --int8 and --web are of ONNX models: --format onnx")
    if split and (int8_on is not None or web is not None):
        raise FusionZooError("--int8 and --web are of a whole model: leave --split out")
    out, page = _unused(out, "--out"), None if web is None else _unused(web, "--web")
    if page is not None:
        page_template()  # before minutes of tracing
        npm_packages = npm_packages or fetch_packages()
    with replacing_folder(out) as folder:
        if split:
            worst, inputs = _write_parts(model, folder)
        else:
            worst, inputs = _write_whole(model, folder, format)
        about = write_preprocess(model, folder, inputs, split=split)
        decode = write_labels(model, folder)
        if page is not None:
            check_web(about, decode)
        if format == "onnx":
            write_example(about, decode, folder)
        files = [x for x in folder.rglob("*") if x.is_file() and x.name != DIGESTS]
        write_digests(folder, files)
        loss = None
        if int8_on is not None:
            loss = _write_int8(model, folder, int8_on)
            write_digests(folder, [*files, folder / INT8, folder / "int8.json"])
        if page is not None and npm_packages is not None:
            write_page(folder, page, model.modalities, Path(npm_packages))
    return Exported(out, worst, loss)


def _unused(folder: str | Path, flag: str) -> Path:
    """Return a folder to write; an error if something is there."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FusionZooError(
            f"{folder} exists and is not empty: choose another {flag}, or remove it"
        )
    return folder


def _write_whole(model: FusionModel, folder: Path, format: str) -> tuple[float, list[str]]:
    """Write one graph; return its largest difference from the model, and its inputs."""
    graph = trace(model)
    program = graph.program.module()
    worst = check(model, program, "the graph of torch.export")
    if format == "torch-export":
        with quiet():
            torch.export.save(graph.program, str(folder / PROGRAM))
        return worst, graph.inputs
    contents = graph.onnx()
    worst = check(model, onnx_runner(contents), "the ONNX model")
    (folder / MODEL).write_bytes(contents)
    return worst, graph.inputs


def _write_parts(model: FusionModel, folder: Path) -> tuple[float, list[str]]:
    """Write a graph for each encoder and one for the fusion."""
    inputs: list[str] = []
    for name, graph in trace_parts(model).items():
        if name == "fusion":
            (folder / FUSION).write_bytes(graph.onnx())
            continue
        inputs += graph.inputs
        (folder / f"{name}.onnx").write_bytes(graph.onnx())
    write_preprocess(model, folder, inputs, split=True)
    write_labels(model, folder)
    write_digests(folder, [x for x in folder.rglob("*") if x.is_file()])
    parts = OnnxModel(folder, threads=1)
    worst = check(model, lambda *batch: list(parts.run(*batch).values()), "the model in parts")
    return worst, inputs


def _write_int8(model: FusionModel, folder: Path, dataset: PairedDataset) -> Int8Cost:
    """Write the model with weights of one byte, or refuse it."""
    quantise(folder / MODEL, folder / INT8)
    sizes = {
        "float32": (folder / MODEL).stat().st_size,
        "int8": (folder / INT8).stat().st_size,
    }
    read = "logits" if model.classes or model.targets else "fused"
    outputs = {
        int8: answers_of(OnnxModel(folder, int8=int8), dataset, model.collate(), read)
        for int8 in (False, True)
    }
    loss = cost(model, outputs[False], outputs[True], dataset.labels, sizes)
    if loss.refused:
        raise FusionZooError(
            f"int8 keeps {loss.same['mean']:.1%} of the answers on {loss.samples} samples of"
            f" {dataset.source}; at least {SAME:.0%} are needed: export without --int8"
        )
    write_json(folder / "int8.json", {**loss._asdict(), "data": dataset.source})
    return loss


def answers_of(
    model: OnnxModel, dataset: PairedDataset, collate: Callable[..., Any], read: str
) -> Tensor:
    """Run all samples of a data set: (N, ...)."""
    rows: list[Mapping[str, Tensor]] = []
    for start in progress_bar(range(0, len(dataset), 16), desc="int8", unit="batch"):
        samples = [dataset[row] for row in range(start, min(start + 16, len(dataset)))]
        rows.append(model.answer(collate(samples)))
    return torch.cat([part[read] for part in rows])
