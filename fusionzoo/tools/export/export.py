"""`fusionzoo export`: a folder with a model's graph that runs without fusionzoo."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fusionzoo.config.load import from_settings, run_command
from fusionzoo.config.schema import PLUGINS, option
from fusionzoo.errors import FusionZooError, keyword_errors
from fusionzoo.files import replacing_folder
from fusionzoo.machine.graphs import quiet, require_onnx
from fusionzoo.model.folder import NAME as DIGESTS
from fusionzoo.model.folder import write_digests
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.loading import load
from fusionzoo.structures import evaluating
from fusionzoo.training.report import Model, model_of, path_of

from .folder import write_example, write_labels, write_preprocess
from .graph import check, onnx_runner, trace
from .runtime import MODEL
from .web import check_web, fetch_packages, page_template, write_page

PROGRAM = "model.pt2"
HELP = """
Write a model for other runtimes: `fusionzoo export runs/a --format onnx --out exported`.

The folder holds the graph, preprocess.json, labels.json, digests, what the model folder says of
training data and calibration, and an example script that needs no fusionzoo. The graph is compared
with the model at other numbers of rows, other lengths and every subset of modalities; one that
differs is not written. Needs `fusionzoo[onnx]` for ONNX.
"""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of `fusionzoo export`."""

    model: str = option("", "a run folder or a model folder (required)")
    out: str = option("", "folder to write; default: `exported` beside the model")
    format: Literal["onnx", "torch-export"] = option("onnx", "of the graph")
    web: str = option("", "also a static page that answers in the browser: folder to write")
    npm_packages: str = option("", "a node_modules with what the page needs; default: by npm")
    plugins: str | list[str] = option("", PLUGINS)


class ExportFiles(NamedTuple):
    """What was written."""

    folder: Path
    difference: float  # from the model's answers, over max(1, the largest value)


def export_command(args: Sequence[str]) -> int:
    """Run `fusionzoo export MODEL ...`; return its exit code."""
    return run_command(ExportConfig, HELP, args, _export_and_print, words=("model",))


def _export_and_print(cfg: ExportConfig) -> int:
    if not cfg.model:
        raise FusionZooError("say what to export: fusionzoo export runs/a")
    model = load(cfg.model, plugins=cfg.plugins)
    written = _export(cfg, model)
    size = sum(x.stat().st_size for x in written.folder.rglob("*") if x.is_file())
    print(f"wrote   {written.folder}, {size / 1e6:,.1f} MB")
    print(
        f"equal   to {written.difference:.1g} on every subset of modalities, at other numbers of"
        " rows and lengths"
    )
    if (written.folder / "example.py").is_file():
        values = " ".join(f"{name}=..." for name in model.modalities)
        print(f"next    python {written.folder / 'example.py'} {values}")
    if cfg.web:
        print(
            f"page    python -m http.server --directory {cfg.web}    (any server of static files)"
        )
    return 0


@keyword_errors
def export(model: Model, out: str | os.PathLike[str] = "", **settings: Any) -> ExportFiles:
    """Write a model for other runtimes into a folder: `export(run, "exported").folder`.

    The folder must be new or empty; without `out` it is `exported` beside the model. Settings are
    those of `fusionzoo export`: `format="torch-export"`, `web`, ... A graph that differs
    from the model is an error, and nothing is written then.
    """
    words = {**settings, "model": path_of(model), "out": os.fspath(out)}
    cfg = from_settings(ExportConfig, words)
    if not (cfg.model or cfg.out):
        raise FusionZooError("--out is missing: the folder to write")
    loaded = model_of(model) or load(cfg.model, plugins=cfg.plugins)
    on_cpu = loaded if loaded.device.type == "cpu" else copy.deepcopy(loaded).cpu()
    with evaluating(on_cpu):
        return _export(cfg, on_cpu)


def _export(cfg: ExportConfig, model: FusionModel) -> ExportFiles:
    """Export a model that is in evaluation mode, on the CPU."""
    if cfg.format == "onnx":
        require_onnx()
    elif cfg.web:
        raise FusionZooError("--web is of ONNX models: --format onnx")
    out = _unused(cfg.out or Path(cfg.model) / "exported", "--out")
    page = _unused(cfg.web, "--web") if cfg.web else None
    npm_packages = cfg.npm_packages
    if page is not None:
        page_template()  # before minutes of tracing
        npm_packages = npm_packages or str(fetch_packages())
    with replacing_folder(out) as folder:
        worst, inputs = _write_graph(model, folder, cfg.format)
        about = write_preprocess(model, folder, inputs)
        decode = write_labels(model, folder)
        model.save_facts(folder)
        if page is not None:
            check_web(about, decode)
        if cfg.format == "onnx":
            write_example(about, decode, folder)
        write_digests(folder, [x for x in folder.rglob("*") if x.is_file() and x.name != DIGESTS])
        if page is not None:
            write_page(folder, page, model.modalities, Path(npm_packages))
    return ExportFiles(out, worst)


def _unused(folder: str | Path, flag: str) -> Path:
    """Return a folder to write; an error if something is there."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FusionZooError(
            f"{folder} exists and is not empty: choose another {flag}, or remove it"
        )
    return folder


def _write_graph(model: FusionModel, folder: Path, format: str) -> tuple[float, list[str]]:
    """Write the graph; return its largest difference from the model, and its inputs."""
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
