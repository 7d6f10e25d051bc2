"""Graphs of a module for other runtimes: torch.export and ONNX, of sizes that stay free.

A graph that was traced with one size may have frozen it, and then loads, runs and answers wrongly
or fails at another size only. So sizes are named, and who makes a graph compares it with the module
at other sizes (`difference`).
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError

TOLERANCE = 1e-4  # of a graph's outputs, times max(1, the largest value)
OPSET = 20
Run = Callable[..., Sequence[Tensor]]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch's exporters say of themselves, in the block."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with redirect_stderr(io.StringIO()):
                yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def export_program(module: nn.Module, arguments: tuple[Any, ...], shapes: Any) -> Any:
    """Trace a module in evaluation mode; `shapes` names the sizes that stay free.

    Returns a `torch.export.ExportedProgram`.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    # The fused kernel of torch's transformer layers has no counterpart in other runtimes.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with quiet():
            return torch.export.export(
                module,
                arguments,
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def has_onnx() -> bool:
    """Return whether what the extra `onnx` installs is here."""
    return all(find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript"))


def require_onnx() -> None:
    """Raise if what the extra `onnx` installs is not here."""
    if not has_onnx():
        raise FusionZooError(
            "ONNX needs onnx, onnxruntime and onnxscript: pip install 'fusionzoo[onnx]'"
        )


def onnx_bytes(
    program: Any, inputs: Sequence[str], outputs: Sequence[str], *, optimise: bool = True
) -> bytes:
    """Translate an exported program to ONNX, with these names; weights are within.

    `optimise` folds constants, which takes longer and makes what quantisation can read.
    """
    with quiet():
        translated = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            optimize=optimise,
        )
    assert translated is not None
    stored: bytes = translated.model_proto.SerializeToString()
    return stored


def open_session(model: bytes | str, threads: int = 0) -> Any:
    """Open an ONNX model on the CPU; `threads` 0 leaves their number to ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Run an ONNX model on tensors; what it does not read is left out."""
    names = [one.name for one in session.get_inputs()]
    answers: list[np.ndarray] = session.run(None, {name: inputs[name].numpy() for name in names})
    return [torch.from_numpy(answer) for answer in answers]


def difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, over max(1, the largest value) of each output."""
    worst = 0.0
    for output, wanted in zip(outputs, expected, strict=True):
        if output.shape != wanted.shape:
            return float("inf")
        if not wanted.numel():
            continue
        off = (output.double() - wanted.double()).abs().max() / max(1.0, wanted.abs().max().item())
        worst = max(worst, off.nan_to_num(float("inf")).item())
    return worst
