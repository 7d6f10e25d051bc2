"""Weights of one byte: which are stored so, and how much of a model's answers it costs.

Weights of matrix products, convolutions and embedding tables are stored as int8, with a scale for
each output channel or row, and read as float32: all arithmetic stays float32. Products in int8,
with a scale for each input, are up to a sixth faster, but on a model of pictures and a table they
changed 2.9 % of the answers, stored weights 1.1 % (docs/deploy.md). What reads a spectrum (the mel
filter bank), what gives the logits, and kernels of few weights (depthwise ones, and those of
pixels) stay float32: they hold much of the error and little of the size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.statistics import share_interval
from fusionzoo.model import FusionModel
from fusionzoo.targets import Number, OneOf, Target

SAME = 0.97  # share of the answers that must stay
NEAR = 0.1  # standard deviations of a number by which it counts as the same
FEW = 3  # channels that a kernel of few weights reads
CHANNEL_AXES = {("Conv", 1): 0, ("MatMul", 1): -1, ("Gather", 0): 0}  # by operation and input
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
SPECTRA = ("STFT", "DFT")


def quantise(source: Path, target: Path) -> None:
    """Write an ONNX model with weights of one byte."""
    import onnx

    model = onnx.load(str(source))
    store_weights(model.graph, exact_nodes(model.graph))
    onnx.save(model, str(target))


def store_weights(graph: Any, exact: Collection[str]) -> None:
    """Replace weights of a graph, but for those of nodes that stay `exact`, by int8 and a node that
    makes them float32 again."""
    from onnx import helper, numpy_helper

    weights = {weight.name: weight for weight in graph.initializer}
    axes: dict[str, set[int | None]] = {}  # of the channels, by weight; None: stays as it is
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in weights:
                axis = None if node.name in exact else _channel_axis(node, place)
                axes.setdefault(name, set()).add(axis)
    for name, found in axes.items():
        axis = found.pop() if len(found) == 1 else None
        if axis is None:
            continue
        values = numpy_helper.to_array(weights[name])
        is_kernel_of_few = values.ndim > 2 and values.shape[1] <= FEW
        if values.dtype != np.float32 or values.ndim < 2 or is_kernel_of_few:
            continue
        axis %= values.ndim
        others = tuple(x for x in range(values.ndim) if x != axis)
        largest = np.abs(values).max(axis=others, keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        stored = {f"{name}_int8": np.rint(values / scale).astype(np.int8)}
        stored[f"{name}_scale"] = scale.reshape(-1)
        graph.initializer.remove(weights[name])
        graph.initializer.extend(numpy_helper.from_array(x, key) for key, x in stored.items())
        maker = helper.make_node("DequantizeLinear", [*stored], [name], axis=axis)
        graph.node.insert(0, maker)


def _channel_axis(node: Any, place: int) -> int | None:
    """Return the axis of the output channels, or rows, of a node's input; None: no weight."""
    if (node.op_type, place) == ("Gemm", 1):
        return 0 if any(x.name == "transB" and x.i for x in node.attribute) else 1
    return CHANNEL_AXES.get((node.op_type, place))


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
    if not total:
        raise FusionZooError("int8 is compared on validation data, and there is none")
    low, high = share_interval(count / total, total)
    return {"mean": count / total, "low": low, "high": high}
