"""Training strategies beside functions of their authors, on the same numbers."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from sklearn import preprocessing
from sklearn.cluster import KMeans
from sklearn.metrics import accuracy_score
from torch import Tensor, nn

from fusionzoo import create_model
from fusionzoo.distributed import World
from fusionzoo.structures import Features
from fusionzoo.training.balance import agm, cggm, mixup, mla, ogm_ge, opm, pmr, relearn
from fusionzoo.training.balance._shared import nt_xent
from fusionzoo.training.balance.base import BALANCE, StrategyInputs

from .case import CLASSES, DIM, ROWS, Row

Pairs = Mapping[str, tuple[Any, Any]]  # what -> ours, theirs: tensors of one shape
ALPHA, WIDTH = 0.3, 20


@dataclass(frozen=True)
class Functions:
    """One strategy, and the authors' functions and classes that it is compared with."""

    strategy: str
    repository: str
    names: Mapping[str, tuple[str, ...]]  # file -> functions and classes at its top
    compare: Callable[[Any], Pairs]


def compare_functions(case: Functions, clones: Path) -> list[Row]:
    """Cut the functions out of the authors' script, run both on the same numbers, return rows."""
    git = ["git", "-C", str(clones / case.repository.partition("/")[2])]

    def answer(*words: str) -> str:
        return subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout

    parts = [
        definition(answer("show", f"HEAD:{file}"), name)
        for file, names in case.names.items()
        for name in names
    ]
    known: dict[str, Any] = {"np": np, "torch": torch, "nn": nn, "F": F, "re": re, "tqdm": iter}
    known |= {"preprocessing": preprocessing, "KMeans": KMeans, "accuracy_score": accuracy_score}
    known |= {"LightningModule": nn.Module, "tanh": torch.tanh, "math": math, "func": F}
    known |= {"all_gather_batch_with_grad": list, "Accuracy": lambda *_: torch.zeros(())}
    torch.manual_seed(0)
    with redirect_stdout(StringIO()):
        exec("\n".join(parts), known)
        pairs = case.compare(SimpleNamespace(**known))
    commit = answer("rev-parse", "--short", "HEAD").strip()
    rows: list[Row] = []
    for what, (ours, theirs) in pairs.items():
        gap = (ours - theirs).abs().max().item()
        values = [f"{x.item():.5f}" if x.ndim == 0 else "" for x in (ours, theirs)]
        rows.append((case.strategy, case.repository, commit, what, *values, f"{gap:.1e}"))
    return rows


def definition(text: str, name: str) -> str:
    """Return the source of a function or class at the top of a script, which may not parse."""
    found = re.search(rf"^(?:def|class) {name}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"no {name} at the top of the authors' script")
    return found[0]


def built(name: str, **settings: Any) -> Any:
    """Return a strategy for a model of three vectors."""
    vector = {"name": "vector/identity", "kind": "vector", "in_dim": DIM}
    model = create_model("concat", {x: vector for x in "abc"}, CLASSES, dim=DIM)
    inputs = StrategyInputs(model, torch.arange(CLASSES).repeat(ROWS), 0, World())
    return BALANCE.create(name, inputs, **settings)


def unit_vectors() -> Tensor:
    return F.normalize(torch.randn(3, ROWS, DIM), dim=-1)


def symile(code: Any) -> Pairs:
    vectors, pairs = unit_vectors()[:, :8], {}
    for ours, theirs in (("n", "n"), ("all", "n_squared")):
        strategy = built("symile", negatives=ours)
        torch.manual_seed(1)
        loss = code.Symile(theirs)([*vectors], strategy.scale.exp())
        same_draws = torch.Generator().manual_seed(1)
        pairs[f"loss, negatives {ours}"] = strategy.loss(vectors, same_draws).mean(), loss
    return pairs


def gmc(code: Any) -> Pairs:
    first, second, joint = unit_vectors()
    loss, _ = code.GMC.infonce(None, [first, second, joint], ALPHA, ROWS)
    ours = sum(nt_xent(joint, x, ALPHA).mean() for x in (first, second))
    return {"loss": (torch.as_tensor(ours), loss)}


def comm(code: Any) -> Pairs:
    views = [[F.normalize(torch.randn(ROWS, DIM), dim=1) for _ in "abf"] for _ in range(2)]
    settings = {"aug1_embed": views[0], "aug2_embed": views[1], "prototype": 2}
    theirs = code.CoMMLoss(temperature=ALPHA)(settings)["loss"]
    terms = [nt_xent(x, views[1 - n][2], ALPHA).mean() for n in range(2) for x in views[n]]
    return {"loss": (torch.stack(terms).mean(), theirs)}


class Pair(nn.Module):
    """Two encoders of one tensor each, and a linear head of both."""

    fusion_module: Any

    def __init__(self) -> None:
        super().__init__()
        self.audio_net = nn.Conv2d(1, DIM, (1, WIDTH), bias=False)
        self.visual_net = nn.Conv2d(1, DIM, (1, WIDTH), bias=False)
        self.fusion_module = nn.Module()
        self.fusion_module.fc_out = nn.Linear(2 * DIM, CLASSES)

    def forward(self, audio: Tensor, visual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, v = self.audio_net(audio).flatten(1), self.visual_net(visual).flatten(1)
        return a, v, self.fusion_module.fc_out(torch.cat([a, v], 1))


class WithHeads(Pair):
    """The same with a head of each encoder, one of which wants the opposite of the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.head_audio, self.head_visual = nn.Linear(DIM, CLASSES), nn.Linear(DIM, CLASSES)
        weight = self.fusion_module.fc_out.weight.detach()
        self.head_audio.weight.data = -weight[:, :DIM]
        self.head_visual.weight.data = weight[:, DIM:]

    def forward(self, audio: Tensor, visual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, v, out = super().forward(audio, visual)
        return out, self.head_audio(a), self.head_visual(v)


def batch_of_two() -> tuple[Tensor, Tensor, Tensor]:
    audio, visual = 3 * torch.randn(2, ROWS, 1, WIDTH)
    return audio, visual[:, None], torch.randint(CLASSES, (ROWS,))


def gradients_of(loss: Tensor, model: Pair) -> list[Tensor]:
    weights = [model.audio_net.weight, model.visual_net.weight]
    return [*torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)]


def ogm(code: Any) -> Pairs:
    audio, visual, label = batch_of_two()
    model = Pair()
    wrapped = nn.Module()
    wrapped.module = model
    wrapped.forward = model.forward
    settings = {"fusion_method": "concat", "modulation": "OGM", "alpha": ALPHA}
    settings |= {"use_tensorboard": False, "modulation_starts": 0, "modulation_ends": 9}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [(audio, visual, label)]
    args = SimpleNamespace(**settings)
    code.train_epoch(args, 1, wrapped, "cpu", batches, optimizer, mock.Mock())
    head = model.fusion_module.fc_out
    a, v, out = model(audio[:, None], visual)
    parts = zip((a, v), head.weight.split(DIM, 1), strict=True)
    logits = torch.stack([x @ weight.T + head.bias / 2 for x, weight in parts], 1)
    scores = logits.softmax(-1)[torch.arange(ROWS), :, label].mean(0)
    factors = ogm_ge.damping(scores, torch.ones(2, dtype=torch.bool), ALPHA)
    plain = gradients_of(F.cross_entropy(out, label), model)
    theirs = (model.audio_net.weight.grad, model.visual_net.weight.grad)
    return {
        f"gradient of encoder {m}": (factor * x, y)
        for m, (factor, x, y) in enumerate(zip(factors, plain, theirs, strict=True))
    }


def pareto(code: Any) -> Pairs:
    audio, visual, label = batch_of_two()
    model = WithHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [(audio[:, None], visual, label)]
    code.train_epoch(None, 1, model, "cpu", batches, optimizer, None)
    losses = [F.cross_entropy(x, label) for x in model(audio[:, None], visual)]
    joint, *alone = (gradients_of(loss, model) for loss in losses)
    strategy, pairs = built("mmpareto"), {}
    for m, weight in enumerate((model.audio_net.weight, model.visual_net.weight)):
        ours = strategy.combine_gradients([joint[m]], [alone[m][m]])[0]
        agree = "agree" if (joint[m] * alone[m][m]).sum() > 0 else "conflict"
        pairs[f"gradient of encoder {m}, whose losses {agree}"] = ours, weight.grad
    return pairs


def prototypes(code: Any) -> Pairs:
    settings = SimpleNamespace(dataset="CGMNIST", embed_dim=DIM, momentum_coef=0.2)
    strategy, label = built("pmr"), torch.arange(2 * ROWS) % 10
    strategy.prototypes_a = torch.zeros(10, DIM)
    strategy.known_a = torch.zeros(10, dtype=torch.bool)
    theirs: tuple[Any, ...] = ()
    for epoch in range(2):
        x = torch.randn(2 * ROWS, DIM)
        batches = [(x, x, label)] * 10  # of which they read a tenth
        model = nn.Module()
        model.forward = lambda a, v: (a, v, None)
        theirs = code.calculate_prototype(settings, model, batches, "cpu", epoch, *theirs)
        rows = torch.cat([x, torch.ones(2 * ROWS, 1)], 1)
        strategy.sums_a = torch.zeros(10, DIM + 1).index_add_(0, label, rows)
        for name in "bc":
            strategy.get_buffer(f"sums_{name}").zero_()
        strategy.begin_epoch(None, {}, None)
    centres = theirs[0]
    return {
        "prototypes after two epochs": (strategy.prototypes_a, centres),
        "distances": (pmr.distances(x, centres), code.EU_dist(x, centres)),
    }


def shapley(code: Any) -> Pairs:
    full, first, second = torch.randn(3, ROWS, CLASSES)
    logits = {
        frozenset({0, 1}): full,
        frozenset({0}): first,
        frozenset({1}): second,
        frozenset[int](): torch.zeros_like(full),
    }
    ours = torch.zeros(2, ROWS, CLASSES)
    for m, before, weight in agm.marginals(2, 1, torch.Generator()):
        ours[m] += weight * (logits[before | {m}] - logits[before])
    theirs = [x()(full, first, second) for x in (code.Modality_Audio, code.Modality_Visual)]
    return {"Shapley values, f(nothing) = 0": (ours, torch.stack(theirs)), **agm_factors(code)}


def agm_factors(code: Any) -> Pairs:
    """Compare the factors of a third batch, by running means without that batch and with it."""
    phi, label = torch.randn(3, 2, ROWS, CLASSES), torch.randint(CLASSES, (3, ROWS))
    model = mock.Mock(side_effect=[(*x, x.sum(0).requires_grad_()) for x in phi])
    model.net.head.fc.weight.grad = torch.zeros(1)
    settings = {"modality": "Multimodal", "methods": "AGM", "modulation_starts": 0}
    cfg = mock.Mock(**settings, modulation_ends=9, EPOCHS=9, alpha=ALPHA, use_mgpu=False)
    batches = [(*x, y) for x, y in zip(phi, label, strict=True)]
    others = mock.MagicMock()
    code.train(model, batches, others, others, 1, cfg, "cpu", others, others, 0.0, 0.0, 1, 1)
    theirs = torch.tensor(model.update_scale.call_args.args)
    sums = torch.stack(
        [
            torch.stack([F.cross_entropy(x, y, reduction="sum") for x in logits])
            for logits, y in zip(phi, label, strict=True)
        ]
    )
    rows = torch.full((2,), float(ROWS))
    batch = agm.ratios(torch.stack([sums[2], rows]))

    def factors(count: int) -> Tensor:
        running = agm.ratios(torch.stack([sums[:count].sum(0), count * rows]))
        return (ALPHA * (running - batch).clamp(max=10)).exp()

    return {
        "factors, running means of the batches before": (factors(2), theirs),
        "factors": (factors(3), theirs),
    }


def projector(code: Any) -> Pairs:
    embedding, head = torch.randn(ROWS, DIM), nn.Linear(DIM, CLASSES)
    head.weight.grad = torch.zeros_like(head.weight)
    wrapped = nn.Module()
    wrapped.module = head
    plugin = code.GSPlugin.__new__(code.GSPlugin)
    plugin.Pl = torch.eye(DIM)
    plugin.before_update(wrapped, embedding, 0, 1, 1)
    ours = mla.shrink(torch.eye(DIM), embedding.mean(0), 0.1)
    return {"projector after a turn": (ours / ours.norm(), plugin.Pl)}


def direction(code: Any) -> Pairs:
    single, fused, factors = torch.randn(3, CLASSES, DIM), torch.randn(CLASSES, DIM), torch.rand(3)
    cosines = torch.stack(code.cal_cos([*single], fused))
    theirs = (factors.abs().sum() - (factors * cosines).sum()) / 3  # as their script sums them
    return {"direction loss": (cggm.misdirection(factors, single, fused), theirs)}


def rates(code: Any) -> Pairs:
    pairs = {}
    for what, scores in (("first", (20.0, 12.0)), ("second", (9.0, 25.0))):
        sums = torch.tensor([scores, (ROWS, ROWS)])
        theirs = code.calcu_q(*sums[0].clone(), 0.5, 0.5)
        pairs[f"rates of hiding where the {what} leads"] = opm.hiding_rates(sums, 0.5, 0.5), theirs
    return pairs


def shares(code: Any) -> Pairs:
    settings = SimpleNamespace(n_classes=CLASSES, move_lambda=3)
    labels = [np.arange(40 * ROWS) % CLASSES for _ in range(2)]
    centres = np.random.default_rng(0).normal(size=(CLASSES, DIM))
    draws = np.random.default_rng(1).normal(size=(4, 40 * ROWS, DIM))
    spreads = (0.5, 0.9, 0.7, 1.3)  # of training and validation rows, of each modality
    rows = [centres[labels[0]] + x * draw for x, draw in zip(spreads, draws, strict=True)]
    theirs = code.reinit_score(settings, rows[0], rows[2], labels[0], rows[1], rows[3], labels[1])
    every, one = np.ones(len(rows[0]), bool), np.ones(len(rows[0]))
    with mock.patch.object(relearn, "RESTARTS", 1):
        purities = [
            relearn.purity(relearn.Rows(x, every, labels[0], one), CLASSES, 0) for x in rows
        ]
    gaps = (abs(purities[0] - purities[1]), abs(purities[2] - purities[3]))
    ours = [torch.tensor(math.tanh(settings.move_lambda * x)) for x in gaps]
    pairs = zip(ours, theirs, strict=True)
    return {f"share of the way back, modality {m}": pair for m, pair in enumerate(pairs)}


def prefixes(code: Any) -> Pairs:
    x, label = torch.randn(ROWS, DIM), torch.randint(CLASSES, (ROWS,))
    strategy = built("matryoshka", sizes=(2, 4, 8))
    layer = code.MRL_Linear_Layer([2, 4, 8], CLASSES)
    layer.load_state_dict(
        {
            key.replace(f"{size}.", f"nesting_classifier_{number}."): value
            for number, size in enumerate((2, 4, 8))
            for key, value in strategy.heads.state_dict().items()
            if key.startswith(f"{size}.")
        }
    )
    context = SimpleNamespace(
        batch=SimpleNamespace(target=label),
        output=SimpleNamespace(embedding=x),
        criterion=lambda logits, target: F.cross_entropy(logits, target, reduction="none"),
    )
    ours = sum(term.values.mean() for term in strategy.extra_losses(context).values())
    return {"loss": (torch.as_tensor(ours), code.Matryoshka_CE_Loss()(layer(x), label))}


def mixed(code: Any) -> Pairs:
    x, label = torch.randn(ROWS, DIM), torch.randint(CLASSES, (ROWS,))
    torch.manual_seed(1)
    theirs, _, other, share = code.mixup_data(x, label, 0.4, False)
    torch.manual_seed(1)
    order = torch.randperm(ROWS)
    assert torch.equal(other, label[order])
    mask = torch.ones(ROWS, 1, dtype=torch.bool)
    whole = Features(x[:, None], mask, x)
    partner = Features(*(part[order] for part in whole))
    ours = mixup.mix(whole, partner, torch.full((ROWS,), share), False).pooled
    return {"features, the same partners and shares": (ours, theirs)}


STRATEGIES = (
    Functions("symile", "rajesh-lab/symile", {"symile/loss.py": ("Symile",)}, symile),
    Functions(
        "gmc", "miguelsvasco/gmc", {"gmc_code/rl/architectures/models/gmc.py": ("GMC",)}, gmc
    ),
    Functions("comm", "Duplums/CoMM", {"losses/comm_loss.py": ("CoMMLoss",)}, comm),
    Functions(
        "mla",
        "Cecile-hi/Multimodal-Learning-with-Alternating-Unimodal-Adaptation",
        {"utils/utils.py": ("GSPlugin",)},
        projector,
    ),
    Functions("ogm_ge", "GeWu-Lab/OGM-GE_CVPR2022", {"main.py": ("train_epoch",)}, ogm),
    Functions(
        "mmpareto",
        "GeWu-Lab/MMPareto_ICML2024",
        {"code/min_norm_solvers.py": ("MinNormSolver",), "code/MMPareto.py": ("train_epoch",)},
        pareto,
    ),
    Functions(
        "pmr",
        "fanyunfeng-bit/Modal-Imbalance-PMR",
        {"main_Prototype_grad.py": ("EU_dist", "calculate_prototype")},
        prototypes,
    ),
    Functions(
        "agm",
        "lihong2303/AGM_ICCV2023",
        {
            "model/AVMNIST_net.py": ("Modality_Audio", "Modality_Visual"),
            "run/AVMNIST_main.py": ("train",),
        },
        shapley,
    ),
    Functions("cggm", "zrguo/CGGM", {"src/eval_metrics.py": ("cal_cos",)}, direction),
    Functions("opm", "GeWu-Lab/BML_TPAMI2024", {"code/models/Classifier.py": ("calcu_q",)}, rates),
    Functions(
        "relearn",
        "GeWu-Lab/Diagnosing_Relearning_ECCV2024",
        {"code/ours.py": ("purity_score", "reinit_score")},
        shares,
    ),
    Functions(
        "matryoshka",
        "RAIVNLab/MRL",
        {"MRL.py": ("Matryoshka_CE_Loss", "MRL_Linear_Layer")},
        prefixes,
    ),
    Functions("mixup", "facebookresearch/mixup-cifar10", {"train.py": ("mixup_data",)}, mixed),
)
