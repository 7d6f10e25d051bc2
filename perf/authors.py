"""Hold fusions against their authors' modules, weight for weight: `python perf/authors.py CLONES`.

CLONES holds clones of the repositories below, of which nothing is copied here. Of each fusion both
modules are built, the authors' weights are copied, and 32 random samples of three modalities (two
for `qmf`) run through both, without dropout. Writes results/authors.csv: parameters of each part,
and the greatest difference of logits (as log(1 + evidence) where the authors give evidence) and the
mean loss. Seconds on one core.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features, StepContext

ROOT = Path(__file__).parents[1]
COLUMNS = ("fusion", "repository", "at", "what", "fusionzoo", "authors", "difference")
WIDTHS, DIM, CLASSES, ROWS, EPOCH = (20, 30, 12), 16, 5, 32, 10
Answer = tuple[Tensor, Tensor | None]  # logits (B, K) and the mean loss


@dataclass(frozen=True)
class Case:
    """One fusion, where its authors' module is, and which of its parts is which of ours."""

    fusion: str
    repository: str
    file: str
    build: Callable[[ModuleType], nn.Module]
    answer: Callable[[ModuleType, nn.Module, list[Tensor], Tensor], Answer]
    parts: Mapping[str, str]  # ours -> theirs; {m} is a modality's number
    widths: tuple[int, ...] = WIDTHS
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Mapping[str, Callable[[], ModuleType]] = field(default_factory=dict)


def features_of(vectors: list[Tensor]) -> dict[str, Features]:
    """Return complete features of one token each."""
    there = torch.ones(len(vectors[0]), 1, dtype=torch.bool)
    return {str(m): Features(x[:, None], there, x) for m, x in enumerate(vectors)}


def tmc(_: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    with mock.patch.object(torch.Tensor, "cuda", lambda x: x):  # the loss is written for a GPU
        _, evidence, loss = module(dict(enumerate(vectors)), target, EPOCH)
    return evidence.log1p(), loss


def averaged(losses: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    evidences, evidence = module(vectors)
    cpu = torch.device("cpu")
    loss = losses.get_loss(evidences, evidence, target, EPOCH, CLASSES, 50, 1, cpu)
    return evidence.log1p(), loss


def mmdynamics(_: ModuleType, module: Any, vectors: list[Tensor], target: Tensor) -> Answer:
    loss, logits = module(vectors, target)
    return logits, loss


def qmf(_: ModuleType, module: Any, vectors: list[Tensor], __: Tensor) -> Answer:
    return module(*vectors)[0], None  # the loss is part of the training script


def images() -> ModuleType:
    """Return a module in place of the encoders, which here give the vectors themselves."""
    stand_in = ModuleType("models.image")
    stand_in.ImageEncoder = lambda _: nn.Identity()  # type: ignore[attr-defined]
    return stand_in


QMF_SETTINGS = SimpleNamespace(
    img_hidden_sz=20, num_image_embeds=1, hidden=[], dropout=0.0, n_classes=CLASSES
)
LISTS = [[width] for width in WIDTHS]
CASES = (
    Case(
        "tmc",
        "hanmenghan/TMC",
        "TMC ICLR/model.py",
        lambda code: code.TMC(CLASSES, len(WIDTHS), LISTS, 50),
        tmc,
        {"heads.{m}": "Classifiers.{m}.fc.0"},
    ),
    Case(
        "ecml",
        "jiajunsi/RCML",
        "model.py",
        lambda code: code.RCML(len(WIDTHS), LISTS, CLASSES),
        averaged,
        {"heads.{m}": "EvidenceCollectors.{m}.net.0"},
    ),
    Case(
        "dbf",
        "bezirganyan/DBF_uncertainty",
        "model.py",
        lambda code: code.DBFModel(len(WIDTHS), LISTS, CLASSES, aggregation="dbf"),
        averaged,
        {"heads.{m}": "EvidenceCollectors.{m}.net.0"},
    ),
    Case(
        "qmf",
        "QingyangZhang/QMF",
        "RGBD-scene-recognition/models/QMF.py",
        lambda code: code.QMF(QMF_SETTINGS),
        qmf,
        {"heads.0": "clf_rgb.0", "heads.1": "clf_depth.0"},  # `clf_depth_rgb` gives no answer
        widths=(20, 20),
        prepare={"models.image": images},
    ),
    Case(
        "mmdynamics",
        "TencentAILabHealthcare/mmdynamics",
        "model.py",
        lambda code: code.MMDynamic(list(WIDTHS), [DIM], CLASSES, 0.0),
        mmdynamics,
        {
            "gates.{m}": "FeatureInforEncoder.{m}.clf.0",
            "encode.{m}": "FeatureEncoder.{m}.clf.0",
            "heads.{m}": "TCPClassifierLayer.{m}.clf.0",
            "confidence.{m}": "TCPConfidenceLayer.{m}.clf.0",
            "head": "MMClasifier.0.clf.0",
        },
        settings={"dropout": 0.0},
    ),
)


def imported(path: Path, stand_ins: Mapping[str, Callable[[], ModuleType]]) -> ModuleType:
    """Import a file, its imports of a few modules answered by others."""
    spec = importlib.util.spec_from_file_location(f"authors_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({name: make() for name, make in stand_ins.items()})
    try:
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return module


def copy_parts(case: Case, ours: Fusion, theirs: nn.Module) -> dict[str, tuple[int, int]]:
    """Copy the authors' weights; return the parameters of each part, ours and theirs."""
    counts, seen = {}, [0, 0]
    for ours_name, theirs_name in case.parts.items():
        pair = [0, 0]
        for m in range(len(case.widths)) if "{m}" in ours_name else (0,):
            parts = (
                ours.get_submodule(ours_name.format(m=m)),
                theirs.get_submodule(theirs_name.format(m=m)),
            )
            parts[0].load_state_dict(parts[1].state_dict())
            pair = [x + size(part) for x, part in zip(pair, parts, strict=True)]
        counts[ours_name.removesuffix(".{m}")] = (pair[0], pair[1])
        seen = [x + y for x, y in zip(seen, pair, strict=True)]
    counts["others"] = (size(ours) - seen[0], size(theirs) - seen[1])
    return counts


def size(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def compare(case: Case, clones: Path) -> list[tuple[object, ...]]:
    """Build both modules, copy the weights and return the rows."""
    folder = clones / case.repository.partition("/")[2]
    git = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    torch.manual_seed(0)
    vectors = [3 * torch.randn(ROWS, width) for width in case.widths]
    target = torch.randint(CLASSES, (ROWS,))
    code = imported(folder / case.file, case.prepare)
    theirs = case.build(code)
    dims = {str(m): width for m, width in enumerate(case.widths)}
    ours = create_fusion(case.fusion, dims, DIM, CLASSES, **case.settings)
    counts = copy_parts(case, ours, theirs)
    losses = folder / "loss_function.py"
    losses_code = imported(losses, {}) if losses.is_file() else code
    logits, loss = case.answer(losses_code, theirs.eval(), vectors, target)
    output = ours.eval()(features_of(vectors))
    rows: list[tuple[object, ...]] = [
        (f"parameters of {part}", *pair, pair[0] - pair[1]) for part, pair in counts.items()
    ]
    gap = (output.logits - logits).abs().max().item()
    rows.append(("logits", "", "", f"{gap:.1e}"))
    if loss is not None:
        criterion = partial(F.cross_entropy, reduction="none")
        context = StepContext(
            rows=torch.arange(ROWS), epoch=EPOCH, phase=0, criterion=criterion, memory=None
        )
        found = ours.loss(output, target, context).mean().item()
        wanted = loss.item()
        rows.append(("loss", f"{found:.5f}", f"{wanted:.5f}", f"{found - wanted:.1e}"))
    facts = (case.fusion, case.repository, commit)
    return [(*facts, *row) for row in rows]


def main() -> None:
    """Compare every case and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clones", type=Path, help="folder with a clone of each repository")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "authors.csv")
    flags = parser.parse_args()
    rows = [row for case in CASES for row in compare(case, flags.clones)]
    with flags.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    for row in rows:
        print(*row, sep="  ")


if __name__ == "__main__":
    main()
