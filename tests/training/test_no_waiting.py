"""A training step does not make the CPU wait for the device: reading a tensor's values does."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusionzoo.fusion import FUSIONS
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.objective import Objective
from fusionzoo.training.trainer import Trainer
from helpers.strategies import WIDTHS, make_batch, make_model, make_objective, make_trainer

ROOM = str(Path(__file__).parents[2])
ATEN, NUMPY = torch.ops.aten, Tensor.numpy
READS = {
    ATEN._local_scalar_dense,  # item, bool, int, float
    ATEN.nonzero,
    ATEN.masked_select,
    ATEN.equal,
    ATEN._unique2,
    ATEN.unique_consecutive,
    ATEN.unique_dim,
    ATEN.bincount,
}
INDEX = {ATEN.index, ATEN.index_put, ATEN.index_put_}  # by a mask
EVERY_STEP = {
    "count_rows": "rows of a batch, counted on the CPU",
    "_update_weights": "whether the gradients are finite, once",
}
ONE_HOT = "F.one_hot, which looks at its indices on the CPU only"
ROUTED = "each expert runs the rows that are routed to it"
PICKED = "rows that have the modalities are picked; the shape depends on how many"
BACKWARD = "the gradient of picked rows"
KEPT = "a figure in a buffer of its state"
OF_FUSIONS = {
    "dbf": {"evidential_loss": ONE_HOT},
    "drfuse": {"ranking": PICKED},
    "dynmm": {"straight_through": ONE_HOT},
    "ecml": {"evidential_loss": ONE_HOT},
    "embracenet": {"_draw": ONE_HOT},
    "flex_moe": {"<listcomp>": ROUTED},
    "fuse_moe": {"<listcomp>": ROUTED},
    "late_vote": {"forward": ONE_HOT},
    "qmf": {"add": "its memory of losses lies on the CPU"},
    "tmc": {"evidential_loss": ONE_HOT},
}
OF_STRATEGIES = {
    "agm": {"factors": KEPT},
    "cca_loss": {"extra_losses": PICKED, "correlation": PICKED, "_update_once": BACKWARD},
    "cggm": {"_gains": KEPT, "edit_gradients": KEPT, "modulation": KEPT},
    "comm": {"<listcomp>": PICKED, "_encode_views": "a seed", "_update_once": BACKWARD},
    "contrastive_align": {"extra_losses": PICKED, "_update_once": BACKWARD},
    "gmc": {"extra_losses": PICKED, "_update_once": BACKWARD},
    "mixup": {"edit_features": "partners are paired by sample over all processes"},
    "mla": {"edit_gradients": "a turn without rows leaves the projector"},
    "more_fewer": {"proper": "draws until each row has a subset"},
    "ogm_ge": {"edit_gradients": "a factor for each modality"},
    "opm": {"edit_gradients": KEPT},
    "subset_distill": {"proper": "draws until each row has a subset"},
    "symile": {"extra_losses": PICKED},
    "uncertainty": {"place": KEPT, "_refuse_negative": "refuses a loss below zero"},
}
ON_THE_CPU = {"edit_batch", "views", "rows", "to"}  # called on a batch that is not on the device


class Reads(TorchDispatchMode):
    """Names the functions of fusionzoo that read values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket
        masks = args[1] if kind in INDEX else []
        if kind in READS or any(x is not None and x.dtype == torch.bool for x in masks):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Remember who reads, unless the CPU reads what it made itself."""
        stack = [x for x in traceback.extract_stack() if x.filename.startswith(ROOM)]
        names = [x.name for x in stack if "/tests/" not in x.filename]
        if not ON_THE_CPU & {*names}:
            self.readers.append(names[-1])


@contextmanager
def reads_noted() -> Iterator[list[str]]:
    """Note what reads values in the block, also by methods that torch does not dispatch."""
    noted = Reads()
    with pytest.MonkeyPatch.context() as patch, noted:
        for name in ("tolist", "cpu", "numpy"):
            method = getattr(Tensor, name)

            def reading(self: Tensor, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
                if _method is not NUMPY or kwargs.get("force"):  # else it refuses a device's
                    noted.note()
                return _method(self, *args, **kwargs)

            patch.setattr(Tensor, name, reading)
        yield noted.readers


def readers(objective: Objective) -> set[str]:
    """Return what reads values in two steps after the first, which may set something up."""
    trainer = make_trainer(objective.float())
    batch = make_batch().map(lambda x: x.float() if x.is_floating_point() else x)
    trainer.step([batch], StepContext())
    with reads_noted() as names:
        for step in (1, 2):
            trainer.step([batch], StepContext(step=step))
    return {*names} - {*EVERY_STEP}


def test_reading_a_tensor_in_any_way_is_noted() -> None:
    x, mask = torch.tensor([1, 0]), torch.tensor([True, False])
    ways = [*map(methodcaller, ("tolist", "cpu", "nonzero", "unique", "bincount"))]
    ways += [methodcaller("numpy", force=True), itemgetter(mask), lambda x: x[0].item(), any]
    for way in ways:
        with reads_noted() as names, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reads, "note", lambda self: self.readers.append("here"))
            way(x)
        assert names, way
    with reads_noted() as names:
        torch.where(mask, x, 0).sum().sqrt()
        mask.numpy()
    assert not names


@pytest.mark.parametrize("missing", ["0", "0.3"])
def test_a_step_of_the_default_recipe_reads_only_whether_gradients_are_finite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    step, noted = Trainer.step, []

    def watched(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        with reads_noted() as names:
            result = step(self, *args, **kwargs)
        noted.append(names)
        return result

    monkeypatch.setattr(Trainer, "step", watched)
    run = ["--data.missing", missing, "--train.max_steps", "3", "--log", "none", "--device", "cpu"]
    assert train([*run, "--out", str(tmp_path / "run")]) == 0
    assert noted == [["count_rows", "_update_weights"]] * 3


def test_no_forward_pass_on_a_device_reads_its_tensors_where_presence_came_from_the_cpu() -> None:
    objective, cuda = make_objective(), torch.device("cuda")
    batch = make_batch().to(torch.device("cpu"))  # read here: nothing in the block can be
    context = StepContext(rows=objective.rows(batch))
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises where a value is read
        for module in objective.modules():
            for name, weight in module._parameters.items():
                module._parameters[name] = None if weight is None else nn.Parameter(weight.to(cuda))
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(cuda)
        batch, context = batch.to(cuda), context._replace(rows=context.rows.to(cuda))
        assert objective(batch, context).loss.device.type == "cuda"
        with pytest.raises(RuntimeError, match="numpy"):  # it is read where it was replaced there
            objective(batch._replace(present=batch.present.clone()), context)


@pytest.mark.parametrize("name", sorted(FUSIONS))
def test_a_fusion_reads_nothing_but_what_is_listed(name: str) -> None:
    assert readers(make_objective(model=make_model(name))) == {*OF_FUSIONS.get(name, {})}


@pytest.mark.parametrize("name", sorted(BALANCE))
def test_a_strategy_reads_nothing_but_what_is_listed(name: str, tmp_path: Path) -> None:
    settings = {}
    if name == "umt":
        folder = make_model().save(tmp_path)
        settings = {"teachers": dict.fromkeys(WIDTHS, str(folder))}
    assert readers(make_objective(name, settings)) == {*OF_STRATEGIES.get(name, {})}
