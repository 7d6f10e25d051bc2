"""Training strategies beside functions of their authors, on the same numbers.

Not compared: no code of their authors was found for `umt`, `unimodal_aux` and `cca_loss`; that of
`modality_dropout` lacks the step, that of `gblend` the measurement of its weights. SigLIP's authors
have the loss of CLIP, too, whose own published none; SimMLM's code of `more_fewer` was not at hand.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import scipy.special
import torch
import torch.nn.functional as F
from sklearn import preprocessing
from sklearn.cluster import KMeans
from sklearn.metrics import accuracy_score
from torch import Tensor, nn

from fusionzoo import create_model
from fusionzoo.machine.distributed import World
from fusionzoo.structures import Features, FusionOutput, StepContext
from fusionzoo.training.balance import agm, cggm, mixup, mla, ogm_ge, opm, pmr, relearn
from fusionzoo.training.balance._shared import nt_xent
from fusionzoo.training.balance.base import BALANCE, LossTerm, MeanLoss, StrategyInputs

from .case import CLASSES, DIM, ROWS, Row

Pairs = Mapping[str, tuple[Any, Any]]  # what -> ours, theirs: tensors of one shape
ALPHA, WIDTH = 0.3, 20


@dataclass(frozen=True)
class Functions:
    """One strategy, and the authors' functions and classes that it is compared with."""

    strategy: str
    repository: str
    names: Mapping[str, tuple[str, ...]]  # file -> functions and classes in it
    compare: Callable[[Any], Pairs]


def compare_functions(case: Functions, clones: Path) -> list[Row]:
    """Cut the functions out of the authors' script, run both on the CPU, return rows."""
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
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(parts).replace("cuda", "cpu"), known)
        pairs = case.compare(SimpleNamespace(**known))
    commit = answer("rev-parse", "--short", "HEAD").strip()
    rows: list[Row] = []
    for what, (ours, theirs) in pairs.items():
        gap = (ours - theirs).abs().max().item()
        values = [f"{x.item():.5f}" if x.ndim == 0 else "" for x in (ours, theirs)]
        rows.append((case.strategy, case.repository, commit, what, *values, f"{gap:.1e}"))
    return rows


def definition(text: str, name: str) -> str:
    """Return the source of a function or class of a script, which may not parse, or a notebook."""
    if text.startswith("{"):
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    block = rf"^([ \t]*)(?:def|class) {name}\b.*\n(?:\1[ \t]+.*\n|\1\).*\n|[ \t]*\n)*"
    match = re.search(block, text + "\n", re.MULTILINE)
    if match is None:
        raise SystemExit(f"no {name} in the authors' script")
    return dedent(match[0])


def built(name: str, fusion: str = "concat", **settings: Any) -> Any:
    """Return a strategy for a model of three vectors."""
    vector = {"name": "vector/identity", "kind": "vector", "in_dim": DIM}
    model = create_model(fusion, {x: vector for x in "abc"}, CLASSES, dim=DIM)
    inputs = StrategyInputs(model, torch.arange(CLASSES).repeat(ROWS), 0, World())
    return BALANCE.create(name, inputs, **settings)


def classes(label: Tensor, **place: Any) -> StepContext:
    """Return a step on a batch of these classes."""
    batch: Any = SimpleNamespace(target=label)
    return StepContext(batch=batch, criterion=partial(F.cross_entropy, reduction="none"), **place)


def vectors(x: Tensor, present: str = "abc") -> dict[str, Features]:
    """Return vectors (3, B, D) as features of three modalities, of which some are present."""
    mask = torch.ones(x.shape[1], 1, dtype=torch.bool)
    return {
        n: Features(v[:, None], mask & (n in present), v) for n, v in zip("abc", x, strict=True)
    }


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
    context = classes(label)._replace(output=SimpleNamespace(embedding=x))
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


def stages(code: Any, models: list[nn.Module], batch: tuple[Tensor, ...], trained: bool) -> Any:
    """Train two modalities for a stage each, by their script; return what it logs, by stage.

    Where `trained`, both models count as trained before the first stage.
    """
    writer, nothing = mock.Mock(), mock.Mock()
    code.main.__globals__.update(
        dict.fromkeys(("os", "setup_seed", "CramedDataset"), nothing),
        AudioNet=lambda **_: models[0],
        VisualNet=lambda **_: models[1],
        DataLoader=lambda **_: [batch],
        SummaryWriter=lambda _: writer,
        check_status=lambda stage: stage < 2,
        device="cpu",
        init_model=float,
        init_pretrain=lambda model, _: model,
        optim=torch.optim,
        schedule_model=lambda stage, **_: ("audio", "visual")[stage],
        test=lambda *_: 0.0,
    )
    settings = {"dataset": "CREMAD", "n_class": CLASSES, "batch_size": ROWS, "boost_rate": 1.0}
    settings |= {"epochs_per_stage": 1, "correct_epoch": 0, "m_lr": 0.0, "e_lr": 0.0}
    settings |= {"use_lr": False, "common_space": False, "use_pretrain": trained}
    code.main(mock.Mock(**settings, weight1=5.0, weight2=1.0, alpha=ALPHA), "")
    return {x.args[::2]: torch.tensor(x.args[1]) for x in writer.add_scalar.mock_calls}


def boosting(code: Any) -> Pairs:
    x, label = torch.randn(3, ROWS, DIM), torch.randint(CLASSES, (ROWS,))
    strategy = built("reconboost", "late_mean", agreement=ALPHA)
    fusion = strategy.fusion
    models = [nn.Sequential(nn.Flatten(), fusion.project[n], fusion.heads[n]) for n in "ab"]
    logged = [stages(code, models, (x[0], x[1], label), trained) for trained in (False, True)]
    weight = fusion.heads["b"].weight
    theirs = weight.grad.clone()

    def loss(turn: str, epoch: float) -> Tensor:
        context = classes(label, turn=turn, epoch=epoch, features=vectors(x, "ab"))
        term = strategy.main_loss(context, LossTerm.everywhere(torch.zeros(ROWS), 1.0))
        return term.values.mean()

    first, second = loss("a", 0.0), loss("b", 8.0)
    (gradient,) = torch.autograd.grad(second, weight)
    strategy.agreement = 0.0
    (without,) = torch.autograd.grad(loss("b", 8.0), weight)
    boosted, gap = "Train/Boosting Loss", "Train/GA Loss"
    fresh, ready = logged
    return {
        "loss of the first stage": (first, ready[boosted, 0]),
        "loss of the first stage, no model trained before": (first, fresh[boosted, 0]),
        "loss of the second stage": (second, ready[boosted, 1] + ALPHA * ready[gap, 1]),
        "gradient of the second stage": (gradient, theirs),
        "gradient of the second stage, agreement 0": (without, theirs),
    }


def aligned(code: Any) -> Pairs:
    """Run their functions of jax on NumPy's arrays, as on one device."""
    left, right, _ = unit_vectors()
    nn_of_jax = SimpleNamespace(log_sigmoid=lambda x: -np.logaddexp(0, -x))
    lax = SimpleNamespace(pmean=lambda x, _: x)
    code.sigmoid_loss.__globals__.update(
        jnp=np,
        jax=SimpleNamespace(nn=nn_of_jax, lax=lax, scipy=scipy),
        all_gather=lambda x, roll=False, only_others=False: x[:0] if only_others else x,
    )
    pairs = {}
    for mode, function in (("clip", code.softmax_loss), ("siglip", code.sigmoid_loss)):
        strategy = built("contrastive_align", mode=mode)
        settings = [x.item() for x in (strategy.scale.exp(), strategy.bias) if x is not None]
        theirs, _ = function(left.numpy(), right.numpy(), *settings)
        pairs[f"loss, mode {mode}"] = strategy.loss(left, right).mean(), torch.tensor(theirs)
    return pairs


def distilled(code: Any) -> Pairs:
    embeddings, logits = torch.randn(2, ROWS, DIM), torch.randn(2, ROWS, CLASSES)
    level = logits[1, :1].expand(ROWS, -1)

    def ours(goal: Tensor, relation: str) -> Tensor:
        strategy = built("subset_distill", relation=relation, temperature=2.0)
        outputs = zip(embeddings, (logits[0], goal), strict=True)
        student, teacher = (FusionOutput(x, z, {}, None) for x, z in outputs)
        return strategy.distil(student, teacher, torch.ones(ROWS, dtype=torch.bool)).values.mean()

    return {
        "soft targets": (ours(logits[1], "logits"), code.SoftTarget(2.0)(*logits)),
        "mad, equal entropies": (ours(level, "mad"), code.MAD()(*embeddings, level)),
        "mad": (ours(logits[1], "mad"), code.MAD()(*embeddings, logits[1])),
    }


def ramp(code: Any) -> Pairs:
    strategy = built("curriculum_dropout", rate=0.4, ramp=5.0, schedule="exp")
    epochs = [x / 4 for x in range(40)]
    ours = [strategy.rates_at(StepContext(epoch=x))[0] for x in epochs]
    theirs = [1 - code._prob(x, 10 / 5, 0.6) for x in epochs]
    return {"rates of hiding, schedule exp": (torch.tensor(ours), torch.tensor(theirs))}


def ranked(code: Any) -> Pairs:
    """Compare on their logits, the mean similarity of a row to the others of a class."""
    hidden, label = torch.randn(3, ROWS, DIM), torch.randint(CLASSES, (ROWS,))
    one_hot, context = F.one_hot(label, CLASSES), classes(label)
    similarity = hidden @ hidden.mT * (1 - torch.eye(ROWS))
    logits = similarity @ one_hot.float() / one_hot.sum(0)
    strategy = built("more_fewer", on="confidence", stop_subset=False)
    steps = [strategy.violation(logits[n + 1], logits[n], context) for n in range(2)]
    ours = torch.stack([values[mask].sum() for values, mask in steps]).sum()
    theirs = code.rank_loss(SimpleNamespace(input_num=3), one_hot, label[:, None] + 1, hidden)
    return {"R on confidence, summed": (ours, theirs)}


def weighted(code: Any) -> Pairs:
    answers, targets = torch.randn(2, 2, ROWS, 1)
    strategy, s = built("uncertainty", gaussian=True, free_main=True), torch.tensor([0.7, -0.4])
    errors = (answers - targets).square().mean((1, 2))
    places = [strategy.place(name) for name in ("", "other")]
    strategy.log_variances.data[places] = s
    strategy.main_loss(StepContext(), LossTerm.everywhere(torch.zeros(ROWS), 1.0))
    means = {n: MeanLoss(x, torch.tensor(ROWS)) for n, x in zip(("", "other"), errors, strict=True)}
    ours = sum(mean.value for mean in strategy.weigh(means).values())
    theirs = code.criterion([*answers], [*targets], [*s])
    return {"loss of squared errors, theirs halved": (torch.as_tensor(ours), theirs / 2)}


def blended(code: Any) -> Pairs:
    """Build their graph of Caffe2 on tensors by name; ours gives the third modality no weight."""
    x, label = torch.randn(3, ROWS, DIM), torch.randint(CLASSES, (ROWS,))
    fused, weights = torch.randn(ROWS, CLASSES), (0.2, 0.3, 0.5)
    strategy = built("gblend")
    strategy.weights[[0, 1, 3]], strategy.weights[2] = torch.tensor(weights), 0.0
    heads = strategy.heads.heads
    blobs = {"audio": heads["a"](x[0]), "visual": heads["b"](x[1]), "both": fused, "label": label}

    def keep(name: str, value: Any) -> str:
        blobs[name] = value
        return name

    def softmax_with_loss(inputs: list[str], names: list[str]) -> list[str]:
        keep(names[1], F.cross_entropy(*(blobs[name] for name in inputs)))
        return names

    graph = SimpleNamespace(
        SoftmaxWithLoss=softmax_with_loss,
        Scale=lambda blob, name, scale: keep(name, scale * blobs[blob]),
        Sum=lambda names, name: keep(name, sum(blobs[x] for x in names)),
    )
    code.add_weighted_loss.__globals__["add_loss"] = lambda _, logits, *rest, prefix: (
        softmax_with_loss([logits, "label"], ["softmax", f"{prefix}loss"])[1]
    )
    shape = {"multi_label": False, "use_convolutional_pred": False, "num_labels": CLASSES}
    theirs = dict(zip(("audio_weight", "visual_weight", "av_weight"), weights, strict=True))
    code.add_weighted_loss(
        graph, ["audio", "visual", "both"], batch_size=ROWS, loss_scale=1.0, **shape, **theirs
    )
    context = classes(label, features=vectors(x))
    fusion = LossTerm.everywhere(context.criterion(fused, label), 1.0)
    terms = [strategy.main_loss(context, fusion), *strategy.extra_losses(context).values()]
    ours = torch.stack([term.weight * term.values.mean() for term in terms]).sum()
    return {"loss of weights already known": (ours, blobs["loss"])}


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
    Functions(
        "reconboost",
        "huacong/ReconBoost",
        {"models/dynamic_net.py": ("DynamicNet",), "train.py": ("main",)},
        boosting,
    ),
    Functions(
        "contrastive_align",
        "google-research/big_vision",
        {
            "big_vision/trainers/proj/image_text/_deprecated_contrastive.py": (
                "_avg_pos_logit",
                "_avg_neg_logit",
                "softmax_loss",
                "sigmoid_loss",
            )
        },
        aligned,
    ),
    Functions(
        "subset_distill",
        "shicaiwei123/MMANet-CVPR2023",
        {
            "classification/loss/kd/st.py": ("SoftTarget",),
            "classification/loss/kd/mad.py": ("MAD",),
        },
        distilled,
    ),
    Functions(
        "curriculum_dropout",
        "pmorerio/curriculum-dropout",
        {"mnist/evaluate_mnist.py": ("_prob",)},
        ramp,
    ),
    Functions(
        "gblend",
        "facebookresearch/VMZ",
        {"c2/lib/models/loss/loss_creator.py": ("add_weighted_loss",)},
        blended,
    ),
    Functions("more_fewer", "QingyangZhang/CML", {"cpm/CPM_Nets.py": ("rank_loss",)}, ranked),
    Functions(
        "uncertainty",
        "yaringal/multi-task-learning-example",
        {"multi-task-learning-example-pytorch.ipynb": ("criterion",)},
        weighted,
    ),
)
