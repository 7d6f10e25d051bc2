"""What the tests of training strategies share: a small model, its batches, a look into a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from fusionzoo.config import DistConfig, RunConfig, from_tree
from fusionzoo.machine.distributed import World, wrap
from fusionzoo.model.fusion_model import FusionModel, UnimodalHeads, create_model
from fusionzoo.structures import FIRST_STEP, Batch, Features, StepContext
from fusionzoo.training.balance import Balance, LossTerm, StrategyInputs, build_balance
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.trainer import Trainer

WIDTHS = {"image": 5, "text": 7, "audio": 3}
DIMS = {"image": 6, "text": 5, "audio": 4}
ALONE = World()
ROWS, CLASSES = 12, 4
TARGETS = torch.arange(ROWS) % CLASSES
SOME = [(0, 0), (1, 2), (2, 2), (5, 0), (5, 1), (6, 0), (6, 1), (6, 2), (8, 1)]  # row 6: nothing
# Small enough that a dozen rows suffice; what is not here has its defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "cca_loss": {"dim": 2},
    "comm": {"dim": 3},
    "contrastive_align": {"dim": 3},
    "curriculum_dropout": {"ramp": 1},
    "gmc": {"dim": 3},
    "symile": {"dim": 3},
    "opm": {"start": 0.0},
    "reconboost": {"epochs": 1, "rectify": 1},
    "cggm": {"window": 1},
    "relearn": {"every": 1, "clusters": 2},
}
WEIGHTED = ("cca_loss", "comm", "contrastive_align", "gmc", "matryoshka", "mmpareto", "symile")
OFF: dict[str, dict[str, Any]] = {  # a setting that switches a strategy off
    **{name: {"weight": 0} for name in (*WEIGHTED, "umt", "unimodal_aux")},
    **{name: {"rate": 0} for name in ("curriculum_dropout", "modality_dropout", "opm")},
    **{name: {"alpha": 0} for name in ("agm", "pmr")},
    "relearn": {"times": 0},
    "more_fewer": {"alpha": 0, "subset_loss": 0},
    "ogm_ge": {"alpha": 0, "noise": False},
    "subset_distill": {"weight": 0, "label_weight": 0},
}


def make_model(
    fusion: str = "gmu", names: Mapping[str, int] = WIDTHS, **settings: Any
) -> FusionModel:
    torch.manual_seed(0)
    encoders = {
        n: {"name": "vector/mlp", "in_dim": width, "dim": DIMS.get(n, 4), "hidden": 8}
        for n, width in names.items()
    }
    return create_model({"name": fusion, "dim": 8, **settings}, encoders, CLASSES)


def make_objective(
    balance: str = "",
    settings: Mapping[str, Any] | None = None,
    world: World = ALONE,
    *,
    model: FusionModel | None = None,
    dropout: bool = False,
) -> Objective:
    """An Objective in double precision with strategies; `settings` are those of the first."""
    model = make_model() if model is None else model
    prior = torch.full((CLASSES,), 1 / CLASSES)
    heads = UnimodalHeads({n: e.dim for n, e in model.named_encoders()}, 8, prior)
    objective = Objective(model, heads, None, [str(row) for row in range(ROWS)], TARGETS)
    freeze_unused(objective)
    for module in objective.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    first = balance.partition(",")[0]
    chosen = {first: {**SETTINGS.get(first, {}), **(settings or {})}} if first else {}
    objective.balance = build_balance(balance, chosen, StrategyInputs(model, TARGETS, 3, world))
    return objective.double()


def make_trainer(
    objective: Objective,
    tree: Mapping[str, Any] | None = None,
    world: World = ALONE,
    strategy: Literal["ddp", "fsdp"] = "ddp",
) -> Trainer:
    cfg = from_tree(RunConfig, {"optim": {"lr": 0.01}, **(tree or {})})
    wrapped = wrap(objective, DistConfig(strategy=strategy), world)
    groups = param_groups(objective.model, objective.heads, cfg.optim, objective.balance)
    return Trainer(wrapped, build_optimizer(groups, cfg.optim), cfg, world)


def make_batch(absent: list[tuple[int, int]] = SOME, names: Mapping[str, int] = WIDTHS) -> Batch:
    draw = torch.Generator().manual_seed(1)
    present = torch.ones(ROWS, len(names), dtype=torch.bool)
    for row, column in absent:
        present[row, column] = False
    inputs = {
        n: {"values": torch.randn(ROWS, width, generator=draw).double()}
        for n, width in names.items()
    }
    return Batch([str(row) for row in range(ROWS)], inputs, present, TARGETS.clone())


def make_loaders(batch: Batch | None = None) -> dict[str, DataLoader[Batch]]:
    """Loaders of a batch, of which validation has the second half twice."""
    batch = make_batch() if batch is None else batch
    parts = {"train": list(range(ROWS)), "val": [*range(ROWS), *range(ROWS // 2, ROWS)]}
    return {
        part: DataLoader(rows, batch_size=5, collate_fn=partial(take_rows, batch))  # type: ignore[arg-type]
        for part, rows in parts.items()
    }


def take_rows(batch: Batch, rows: list[int]) -> Batch:
    return batch.take(torch.tensor(rows, dtype=torch.int64))


def take(batch: Batch, rows: slice) -> Batch:
    return batch.take(torch.arange(len(batch.ids))[rows])


def criterion(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in the precision of the logits, which Objective's is not."""
    return F.cross_entropy(logits, target, reduction="none")


def see(
    objective: Objective,
    batch: Batch,
    context: StepContext = FIRST_STEP,
    features: Mapping[str, Features] | None = None,
) -> StepContext:
    """What a strategy sees of a batch, or of given features."""
    known = objective.model.encode(batch) if features is None else dict(features)
    output = objective.model.fusion(known)
    return context._replace(
        batch=batch,
        rows=objective.rows(batch),
        features=known,
        views=(known, known),
        output=output,
        criterion=criterion,
    )


def only(objective: Objective) -> Balance:
    (one,) = objective.balance.values()
    assert isinstance(one, Balance)
    return one


def mean(term: LossTerm) -> torch.Tensor:
    return term.weight * term.values[term.mask].sum() / max(int(term.mask.sum()), 1)


def save_teachers(folder: Path) -> dict[str, Any]:
    """Save a model that has an encoder of every modality, and return the setting that names it."""
    torch.manual_seed(9)
    model = make_model()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save(folder / "teacher")
    return {"teachers": dict.fromkeys(WIDTHS, str(folder / "teacher"))}


def close(found: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance)
