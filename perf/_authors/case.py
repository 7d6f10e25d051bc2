"""Build a fusion and its authors' module, copy the weights and compare; used by perf/authors.py."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features, FusionOutput, StepContext

COLUMNS = ("fusion", "repository", "at", "what", "fusionzoo", "authors", "difference")
WIDTHS, DIM, CLASSES, ROWS, EPOCH = (20, 30, 12), 16, 5, 32, 10
Answer = Mapping[str, Tensor]  # "logits" (B, K) or "embedding" (B, dim), and the mean "loss"
Given = dict[str, Tensor]
Row = tuple[object, ...]


@dataclass(frozen=True)
class Copied:
    """Parts of the authors' module, and how they are written as one part of ours."""

    names: tuple[str, ...]  # {m} is a modality's number, {letter} its letter
    tensors: Callable[..., Mapping[str, Tensor]]  # of the parts, names within our part


@dataclass(frozen=True)
class Case:
    """One fusion, where its authors' module is, and which of its parts is which of ours."""

    fusion: str
    repository: str
    file: str
    build: Callable[[ModuleType], nn.Module]
    answer: Callable[[ModuleType, Any, list[Tensor], Tensor], Answer]
    parts: Mapping[str, str | Copied]  # ours -> theirs; {m} is a modality's number
    widths: tuple[int, ...] = WIDTHS
    lengths: tuple[int, ...] = ()  # numbers of tokens; () for vectors
    dim: int = DIM
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    identity: tuple[str, ...] = ()  # our layers that the authors' module has not
    zero: tuple[str, ...] = ()  # and those at the end of such a branch
    letters: str = ""  # of the modalities, in the authors' names
    training: bool = False  # whether both are compared as in training


def features_of(inputs: list[Tensor]) -> dict[str, Features]:
    """Return complete features of tokens (B, T, D), or of one token each, (B, D)."""
    features = {}
    for m, x in enumerate(inputs):
        tokens = x if x.ndim == 3 else x[:, None]
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
        features[str(m)] = Features(tokens, mask, tokens.mean(1))
    return features


@contextmanager
def own_modules(roots: list[Path], stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Let imports find the modules of a repository, the first of the folders, and the stand-ins.

    Both are forgotten afterwards.
    """
    before = dict(sys.modules)
    sys.modules.update(stand_ins)
    sys.path[:0] = map(str, roots)
    try:
        yield
    finally:
        del sys.path[: len(roots)]
        new = {name: places_of(name) for name in sys.modules.keys() - before.keys()}
        for name, places in new.items():
            if name in stand_ins or any(place.startswith(str(roots[0])) for place in places):
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in stand_ins if name in before})


def places_of(name: str) -> list[str]:
    """Return the file and the folders of an imported module."""
    names = vars(sys.modules[name])
    return [str(names.get("__file__")), *map(str, names.get("__path__") or ())]


def imported(path: Path) -> ModuleType:
    """Import a file, which may import relative to its own folder and to the one above."""
    for name, folder in (("authors_code", path.parent.parent), ("authors_code.own", path.parent)):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    spec = importlib.util.spec_from_file_location(f"authors_code.own.{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_part(name: str, module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a part, which may be one itself."""
    state = module.state_dict(keep_vars=True)
    return {key: x for key, x in state.items() if key == name or key.startswith(f"{name}.")}


def expanded(case: Case) -> Iterator[tuple[str, str, Copied]]:
    """Return the label, our name and their parts of each part, those of `{m}` one by one."""
    for ours, theirs in case.parts.items():
        part = theirs if isinstance(theirs, Copied) else Copied((theirs,), same_names)
        for m in range(len(case.widths)) if "{m}" in ours else (0,):
            letter = case.letters[m : m + 1]
            names = tuple(name.format(m=m, letter=letter) for name in part.names)
            yield re.sub(r"\.(\{m\}|\d+)", "", ours), ours.format(m=m), Copied(names, part.tensors)


def same_names(part: nn.Module | Tensor) -> dict[str, Tensor]:
    """Return the parameters of a part under their names."""
    return {"": part} if isinstance(part, Tensor) else dict(part.named_parameters())


def spread(tensors: list[Tensor]) -> float:
    """Return the root mean square of matrices, biases and other vectors left out."""
    matrices = [x.detach().flatten() for x in tensors if x.ndim > 1]
    return torch.cat(matrices).square().mean().sqrt().item() if matrices else 0.0


def copy_parts(case: Case, ours: Fusion, theirs: nn.Module) -> list[Row]:
    """Copy the authors' weights; return parameters and initial spread of each part, both."""
    groups: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    for label, name, part in expanded(case):
        their_parts = [attrgetter(path)(theirs) for path in part.names]
        our_tensors = of_part(name, ours)
        group = groups.setdefault(label, ([], []))
        their_tensors = [x for piece in their_parts for x in same_names(piece).values()]
        pairs = (our_tensors.values(), their_tensors)
        for known, pieces in zip(group, pairs, strict=True):
            known.extend(x.detach().clone() for x in pieces if isinstance(x, nn.Parameter))
        tensors = part.tensors(*their_parts)
        copied = {f"{name}.{key}" if key else name: x for key, x in tensors.items()}
        if copied.keys() != our_tensors.keys():
            raise SystemExit(f"{case.fusion}: {name} has {[*our_tensors]}, not {[*copied]}")
        ours.load_state_dict(copied, strict=False)
    for name in (*case.identity, *case.zero):
        layer = ours.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        start_weight = nn.init.zeros_ if name in case.zero else nn.init.eye_
        start_weight(layer.weight)
        nn.init.zeros_(layer.bias)
    rows: list[Row] = []
    seen = [0, 0]
    for label, pair in groups.items():
        count = [sum(x.numel() for x in tensors) for tensors in pair]
        start = [spread(tensors) for tensors in pair]
        if not any(count):  # buffers alone
            continue
        seen = [x + y for x, y in zip(seen, count, strict=True)]
        rows.append((f"parameters of {label}", *count, count[0] - count[1]))
        if all(start):
            values = (f"{x:.3f}" for x in (*start, start[0] - start[1]))
            rows.append((f"initial spread of {label}", *values))
    others = [size(module) - known for module, known in zip((ours, theirs), seen, strict=True)]
    return [*rows, ("parameters of others", *others, others[0] - others[1])]


def size(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def inputs_of(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return random vectors (B, D) or tokens (B, T, D) of each modality, and classes."""
    lengths = case.lengths or (0,) * len(case.widths)
    shapes = [
        (ROWS, *([length] if length else []), width)
        for length, width in zip(lengths, case.widths, strict=True)
    ]
    return [3 * torch.randn(shape) for shape in shapes], torch.randint(CLASSES, (ROWS,))


def compare(case: Case, clones: Path) -> list[Row]:
    """Build both modules, copy the weights and return the rows."""
    root = (clones / case.repository.partition("/")[2]).resolve()
    git = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    torch.manual_seed(0)
    inputs, target = inputs_of(case)
    stand_ins = {name: make() for name, make in case.prepare.items()}
    losses = root / "loss_function.py"
    roots = [root, (root / case.file).parent]
    with own_modules(roots, stand_ins), redirect_stdout(StringIO()):  # some print their layers
        code = imported(root / case.file)
        theirs = case.build(code)
        code = imported(losses) if losses.is_file() else code
    dims = {str(m): width for m, width in enumerate(case.widths)}
    ours = create_fusion(case.fusion, dims, case.dim, CLASSES, **case.settings)
    rows = copy_parts(case, ours, theirs)
    torch.manual_seed(1)  # where both draw, they draw the same
    answer = case.answer(code, theirs.train(case.training), [x.clone() for x in inputs], target)
    torch.manual_seed(1)
    output = ours.train(case.training)(features_of(inputs))
    for what, wanted in answer.items():
        if what == "loss":
            rows.append(loss_row(ours, output, target, wanted))
        else:
            gap = getattr(output, what.partition(" ")[0]) - wanted
            rows.append((what, "", "", f"{gap.abs().max().item():.1e}"))
    return [(case.fusion, case.repository, commit, *row) for row in rows]


def loss_row(ours: Fusion, output: FusionOutput, target: Tensor, wanted: Tensor) -> Row:
    """Compare the mean loss."""
    context = StepContext(
        rows=torch.arange(ROWS),
        epoch=EPOCH,
        phase=0,
        criterion=partial(F.cross_entropy, reduction="none"),
        memory=None,
    )
    our_loss = ours.loss(output, target, context).mean().item()
    difference = our_loss - wanted.item()
    return "loss", f"{our_loss:.5f}", f"{wanted.item():.5f}", f"{difference:.1e}"
