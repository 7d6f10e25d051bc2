"""Weights of one byte: what is quantised, and how much of a model's answers it costs.

Matrix products run in int8, with a scale for each column of weights and one for each input;
embedding tables and the kernels of convolutions are stored as int8, with a scale for each channel,
and read as float32: convolutions that run in int8 changed 5 % of the answers of the `stamps` recipe
and took twice the time (docs/deploy.md). The rest stays float32: what reads a spectrum (the mel
filter bank) and what gives the logits, which cost most of the accuracy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel
from fusionzoo.targets import Number, OneOf, Target

SAME = 0.97  # share of the answers that must stay
NEAR = 0.1  # standard deviations of a number by which it counts as the same
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
SPECTRA = ("STFT", "DFT")


def quantise(source: Path, target: Path) -> None:
    """Write an ONNX model with weights of one byte."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from fusionzoo.graphs import quiet

    exact = exact_nodes(onnx.load(str(source)).graph)
    with quiet():
        quantize_dynamic(
            str(source),
            str(target),
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=exact,
        )
    model = onnx.load(str(target))
    store_kernels(model.graph, exact)
    onnx.save(model, str(target))


def store_kernels(graph: Any, exact: Collection[str]) -> None:
    """Replace the kernels of a graph's convolutions, but for nodes that stay `exact`, by int8 and a
    node that makes them float32 again."""
    from onnx import helper, numpy_helper

    readers = Counter(name for node in graph.node for name in node.input)
    weights = {weight.name: weight for weight in graph.initializer}
    makers = []
    for node in graph.node:
        if node.op_type != "Conv" or node.name in exact:
            continue
        name = node.input[1]
        if name not in weights or readers[name] > 1:
            continue
        kernel = numpy_helper.to_array(weights[name])
        largest = np.abs(kernel).max(axis=tuple(range(1, kernel.ndim)))
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        rounded = np.rint(kernel / scale.reshape(-1, *[1] * (kernel.ndim - 1))).astype(np.int8)
        graph.initializer.remove(weights[name])
        stored = {f"{name}_int8": rounded, f"{name}_scale": scale}
        graph.initializer.extend(numpy_helper.from_array(x, key) for key, x in stored.items())
        makers.append(helper.make_node("DequantizeLinear", [*stored], [name], axis=0))
    for maker in reversed(makers):
        graph.node.insert(0, maker)


def exact_nodes(graph: Any) -> list[str]:
    """Return the names of the products that stay float32: the last before `logits`, and the first
    behind a spectrum."""
    makers = {name: [node] for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def search(starts: Sequence[str], forward: bool) -> set[str]:
        names, seen, waiting = set(), set(), list(starts)
        while waiting:
            for node in (readers if forward else makers).get(waiting.pop(), []):
                if node.name in seen:
                    continue
                seen.add(node.name)
                if node.op_type in PRODUCTS:
                    names.add(node.name)
                else:
                    waiting += node.output if forward else node.input
        return names

    spectra = [name for node in graph.node if node.op_type in SPECTRA for name in node.output]
    return sorted(search(["logits"], forward=False) | search(spectra, forward=True))


class Int8Cost(NamedTuple):
    """What int8 changed on data that training did not read."""

    samples: int
    same: Mapping[str, float]  # share of the same answers: mean, low, high (95 %, Wilson)
    accuracy: Mapping[str, Any] | None  # of float32 and int8, and their difference; of classes
    bytes: Mapping[str, int]

    @property
    def refused(self) -> bool:
        """Whether too many answers changed."""
        return self.same["mean"] < SAME


def cost(
    model: FusionModel, exact: Tensor, int8: Tensor, labels: Sequence[Any], sizes: Mapping[str, int]
) -> Int8Cost:
    """Compare the outputs of both on the same rows: logits (N, K), or unit vectors (N, D)."""
    same = same_answers(model, exact, int8)
    accuracy = None
    if model.targets is None and model.classes and None not in labels:
        index = torch.tensor([model.classes.index(str(label)) for label in labels])
        right = [(x.argmax(-1) == index).double() for x in (exact, int8)]
        change = right[1] - right[0]
        half = 1.96 * change.std().item() / len(change) ** 0.5 if len(change) > 1 else 1.0
        mean = change.mean().item()
        accuracy = {
            "float32": right[0].mean().item(),
            "int8": right[1].mean().item(),
            "difference": {"mean": mean, "low": mean - half, "high": mean + half},
        }
    return Int8Cost(len(exact), wilson(int(same.sum()), len(same)), accuracy, dict(sizes))


def same_answers(model: FusionModel, exact: Tensor, int8: Tensor) -> Tensor:
    """Return in which rows the answers are the same, (N,) bool: the class, every label, the level;
    numbers within 0.1 standard deviations; without a target, vectors with a cosine above 0.99."""
    if not model.classes and not model.targets:
        return torch.nn.functional.cosine_similarity(exact, int8) > 0.99
    targets: Sequence[Target] = model.targets or [OneOf("target", tuple(model.classes))]
    widths = [target.width for target in targets]
    parts = zip(targets, exact.split(widths, -1), int8.split(widths, -1), strict=True)
    same = torch.ones(len(exact), dtype=torch.bool)
    for target, first, second in parts:
        if isinstance(target, Number):
            same &= (first - second).abs().amax(-1) <= NEAR
        else:
            answers = zip(target.decode(first), target.decode(second), strict=True)
            same &= torch.tensor([label(one) == label(other) for one, other in answers])
    return same


def label(answer: Any) -> Any:
    """Return the label, or labels, of an answer."""
    return getattr(answer, "label", None) or getattr(answer, "labels", None)


def wilson(count: int, total: int) -> dict[str, float]:
    """Return a share with its 95 % interval (Wilson 1927)."""
    from scipy.stats import binomtest

    if not total:
        raise FusionZooError("int8 is compared on validation data, and there is none")
    interval = binomtest(count, total).proportion_ci(method="wilson")
    return {"mean": count / total, "low": float(interval.low), "high": float(interval.high)}
