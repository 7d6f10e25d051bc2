"""Draw how data flow through a fusion, as SVG, from one forward pass of the module.

A node is an input, the call of a submodule, an operation that joins several nodes (concatenation,
product, sum), or an output. What reads only one node (tanh, softmax) is written at the edge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fusionzoo.fusion import Fusion
from fusionzoo.structures import Features, FusionOutput, evaluating

# Names of functions as the picture shows them; what is not listed has no label of its own.
JOINS = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "__imul__"), "product"),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__", "sum"), "sum"),
    **dict.fromkeys(("sub", "__sub__", "__rsub__"), "difference"),
    **dict.fromkeys(("einsum", "matmul", "__matmul__", "bmm", "baddbmm"), "tensor product"),
    **dict.fromkeys(("cat", "concat", "stack", "hstack"), "join"),
    **dict.fromkeys(("__setitem__", "where", "index_put"), "select"),
    **dict.fromkeys(("div", "__truediv__"), "quotient"),
    **dict.fromkeys(("maximum", "max", "amax"), "maximum"),
    "scaled_dot_product_attention": "attention",
    "lerp": "interpolate",
}
SHOWN = {
    *("tanh", "sigmoid", "softmax", "log_softmax", "relu", "gelu", "normalize", "exp", "log"),
    *("softplus", "sparsemax", "topk", "argmax", "mean", "max", "amax", "detach", "rfft", "irfft"),
}
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
PASSES = (nn.Dropout, nn.Identity)  # in evaluation the output is the input
WIDTH, HEIGHT, ACROSS, DOWN = 124, 42, 16, 40  # of a box, and the space between boxes, px
SLOT = 20  # width of the place where an edge passes a row of boxes
WIDE = 600  # px; above, a phone scrolls rather than shrinks the picture
CHARACTERS = 18  # that fit into a box


@dataclass(eq=False)
class Node:
    """A box: its text, and the boxes it reads, each with the functions on the way."""

    title: str
    detail: str
    kind: str  # input, module, join, output
    reads: dict[Node, str] = field(default_factory=dict)


class Recorder(TorchFunctionMode):
    """Record which nodes each tensor of a forward pass comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.depth = 0  # of submodule calls
        self._origins: dict[int, tuple[Node, tuple[str, ...]]] = {}  # by the tensor's id
        self._tensors: list[Tensor] = []  # kept alive, so that no id is used twice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.depth == 0:
            name = getattr(func, "__name__", "")
            self._record(name, (args, kwargs), args[0] if name == "__setitem__" else out)
        return out

    def mark(self, values: Any, node: Node, path: tuple[str, ...] = ()) -> None:
        """Say that the tensors in `values` come from a node."""
        for tensor in tensors(values):
            self._origins[id(tensor)] = (node, path)
            self._tensors.append(tensor)

    def add(self, node: Node, values: Any) -> Node:
        """Add a node that reads the origins of `values`."""
        for tensor in tensors(values):
            if id(tensor) in self._origins:
                origin, path = self._origins[id(tensor)]
                node.reads.setdefault(origin, ", ".join(path))
        self.nodes.append(node)
        return node

    def _record(self, name: str, values: Any, out: Any) -> None:
        origins = {
            origin: path
            for tensor in tensors(values)
            for origin, path in [self._origins.get(id(tensor), (None, ()))]
            if origin is not None
        }
        if not origins or not tensors(out):
            return
        if len(origins) == 1:
            ((origin, path),) = origins.items()
            shown = name.removeprefix("fft_")
            path = (*path, shown) if shown in SHOWN and shown not in path else path
            self.mark(out, origin, path)
            return
        title = JOINS.get(name, name)
        last = self.nodes[-1]
        if last.title == title and last in origins and not origins[last]:
            self.nodes.pop()  # a longer chain of the same operation is one node
            longer = self.add(last, [x for x in tensors(values) if self._origin(x) is not last])
            self.mark(out, longer)
            return
        self.mark(out, self.add(Node(title, shape(out), "join"), values))

    def _origin(self, tensor: Tensor) -> Node | None:
        return self._origins.get(id(tensor), (None, ()))[0]


def tensors(values: Any) -> list[Tensor]:
    """Return the real and complex tensors in nested values, not masks and indices."""
    leaves = tree_leaves(values)
    numbers = [x for x in leaves if isinstance(x, Tensor)]
    return [x for x in numbers if x.is_floating_point() or x.is_complex()]


def shape(values: Any) -> str:
    """Write the shape of the first tensor, B for the batch."""
    first = tensors(values)[0].shape
    return f"({', '.join(['B', *map(str, first[1:])])})" if len(first) else "number"


def flow(fusion: Fusion, features: Mapping[str, Features]) -> list[Node]:
    """Return the nodes of one forward pass, inputs first; only those that reach an output."""
    recorder = Recorder()
    for name, (tokens, _, pooled) in features.items():
        for what, tensor in (("pooled", pooled), ("tokens", tokens)):
            node = Node(name, f"{what} {shape(tensor)}", "input")
            recorder.nodes.append(node)
            recorder.mark(tensor, node)
    with evaluating(fusion), torch.no_grad(), hooked(fusion, recorder), recorder:
        output = fusion(features)
    outputs = [recorder.add(*one) for one in _outputs(output)]
    needed = set(outputs)
    for node in reversed(recorder.nodes):
        if node in needed:
            needed |= set(node.reads)
    # Weights that follow from presence alone read no feature.
    return [x for x in recorder.nodes if x in needed and (x.reads or x.kind == "input")]


def _outputs(output: FusionOutput) -> Iterator[tuple[Node, Any]]:
    for name in ("embedding", "weights", "logits"):
        values = getattr(output, name)
        if values is not None:
            yield Node(name, shape(values), "output"), values


@contextmanager
def hooked(fusion: Fusion, recorder: Recorder) -> Iterator[None]:
    """Record each outermost call of a submodule as one node."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.depth += 1

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        recorder.depth -= 1
        if recorder.depth == 0 and tensors(out):
            detail = f"{type(module).__name__} {shape(out)}"
            node = recorder.add(Node(names[module], detail, "module"), (args, kwargs))
            recorder.mark(out, node)

    names = {module: name for name, module in fusion.named_modules() if name}
    handles = []
    for module in names:
        if not isinstance(module, (*CONTAINERS, *PASSES)):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- the picture


def draw(nodes: Sequence[Node], title: str) -> str:
    """Draw nodes from top to bottom, each below all that it reads."""
    rows, chains = place(nodes)
    where = positions(rows)
    width = max(x + _width(node) / 2 for node, (x, _) in where.items())
    height = len(rows) * (HEIGHT + DOWN) - DOWN
    parts = [
        f'<svg class="flow{" wide" * (width > WIDE)}" role="img" width="{width + 4:.0f}"'
        f' viewBox="-2 -2 {width + 4:.0f} {height + 4:.0f}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
    ]
    for chain, label in chains:
        parts.append(_edge([where[node] for node in chain], label))
    for node, (x, y) in where.items():
        if node.kind != "passage":
            parts.append(_box(node, x, y))
    return "".join([*parts, "</svg>"])


def place(nodes: Sequence[Node]) -> tuple[list[list[Node]], list[tuple[list[Node], str]]]:
    """Return the rows of nodes and each edge's chain of nodes, one in every row that it passes."""
    level: dict[Node, int] = {}
    for node in nodes:
        level[node] = max((level[read] + 1 for read in node.reads), default=0)
    last = max(level.values())
    level |= {node: last for node in nodes if node.kind == "output"}
    rows: list[list[Node]] = [[] for _ in range(last + 1)]
    for node in nodes:
        rows[level[node]].append(node)
    chains = []
    for node in nodes:
        for read, label in node.reads.items():
            between = [Node("", "", "passage") for _ in range(level[read] + 1, level[node])]
            for step, passage in enumerate(between, level[read] + 1):
                rows[step].append(passage)
            chains.append(([read, *between, node], label))
    order(rows, chains)
    return rows, chains


def order(rows: list[list[Node]], chains: Sequence[tuple[list[Node], str]]) -> None:
    """Sort each row by the mean place of its neighbours, down and up, so that few edges cross."""
    above, below = defaultdict(list), defaultdict(list)
    for chain, _ in chains:
        for upper, lower in pairwise(chain):
            above[lower].append(upper)
            below[upper].append(lower)
    for _ in range(6):
        for neighbours, sweep in ((above, rows[1:]), (below, rows[-2::-1])):
            spot = {x: (i + 0.5) / len(row) for row in rows for i, x in enumerate(row)}
            for row in sweep:
                mean = {x: _mean([spot[y] for y in neighbours[x]], spot[x]) for x in row}
                row.sort(key=mean.__getitem__)
                spot |= {x: (i + 0.5) / len(row) for i, x in enumerate(row)}


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def positions(rows: Sequence[Sequence[Node]]) -> dict[Node, tuple[float, float]]:
    """Return the middle of each node, rows centred, px."""
    widths = [sum(map(_width, row)) + ACROSS * (len(row) - 1) for row in rows]
    where = {}
    for index, (row, width) in enumerate(zip(rows, widths, strict=True)):
        x = (max(widths) - width) / 2
        for node in row:
            where[node] = (x + _width(node) / 2, index * (HEIGHT + DOWN) + HEIGHT / 2)
            x += _width(node) + ACROSS
    return where


def _width(node: Node) -> float:
    return SLOT if node.kind == "passage" else WIDTH


def _edge(points: Sequence[tuple[float, float]], label: str) -> str:
    """Draw a smooth line through points; it passes a row straight, and ends at boxes."""
    half = HEIGHT / 2
    (x, y), *rest = points
    path = f"M{x:.0f} {y + half:.0f}"
    for x_next, y_next in rest:
        middle = (y + half + y_next - half) / 2
        path += f"C{x:.0f} {middle:.0f} {x_next:.0f} {middle:.0f} {x_next:.0f} {y_next - half:.0f}"
        if (x_next, y_next) != points[-1]:
            path += f"V{y_next + half:.0f}"
        x, y = x_next, y_next
    line = f'<path d="{path}"/>'
    if not label:
        return line
    (x, y), (x_next, _) = points[-2:]
    side, shift = ("end", -6) if x < x_next else ("start", 6)
    place = f'x="{x_next + shift + (x - x_next) / 8:.0f}" y="{points[-1][1] - half - 9:.0f}"'
    place += f' text-anchor="{side}"'
    return f"{line}<text {place}>{escape(label)}</text>"


def _box(node: Node, x: float, y: float) -> str:
    left, top = x - WIDTH / 2, y - HEIGHT / 2
    lines = [
        f'<text class="{name}" x="{x:.0f}" y="{y + shift}">{escape(short(text))}</text>'
        for name, text, shift in (("name", node.title, -3), ("detail", node.detail, 12))
    ]
    return (
        f'<g class="{node.kind}"><title>{escape(f"{node.title}: {node.detail}")}</title>'
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f"{''.join(lines)}</g>"
    )


def short(text: str) -> str:
    """Shorten a text to what fits into a box."""
    return text if len(text) <= CHARACTERS + 4 else f"{text[: CHARACTERS + 3]}…"
