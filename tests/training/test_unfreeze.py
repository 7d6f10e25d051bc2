"""Encoders that are frozen for a time: nothing of them moves before, and they learn after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusionzoo.config import OptimConfig, RunConfig, from_tree
from fusionzoo.distributed import World
from fusionzoo.encoders.base import layer_numbers
from fusionzoo.errors import FusionZooError
from fusionzoo.model import UnimodalHeads, create_model
from fusionzoo.structures import Batch, StepContext
from fusionzoo.training.freezing import Unfreezing
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.optim import build_optimizer, param_groups
from fusionzoo.training.trainer import Trainer


def make(**optim: Any) -> Trainer:
    torch.manual_seed(0)
    encoders = {
        "image": {"name": "timm/resnet10t", "pretrained": False, "size": 32},
        "text": {"name": "chars", "dim": 8, "num_layers": 3, "num_heads": 2},
    }
    model = create_model("gmu", encoders, 3, dim=8)
    objective = Objective(model, UnimodalHeads({}, 8, torch.full((3,), 1 / 3)))
    freeze_unused(objective)
    cfg = from_tree(RunConfig, {"optim": {"lr": 1e-2, "weight_decay": 0.1, **optim}})
    groups = param_groups(model, objective.heads, cfg.optim)
    return Trainer(objective, build_optimizer(groups, cfg.optim), cfg, World())


def make_batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (6, 5), generator=draw)
    inputs = {
        "image": {"pixels": torch.randint(256, (6, 3, 32, 32), generator=draw).to(torch.uint8)},
        "text": {"input_ids": tokens, "attention_mask": torch.ones(6, 5, dtype=torch.bool)},
    }
    present = torch.ones(6, 2, dtype=torch.bool)
    return Batch([str(row) for row in range(6)], inputs, present, torch.arange(6) % 3)


def moved(trainer: Trainer, epoch: float, steps: int = 2) -> set[str]:
    """Train some steps of an epoch; return the names of the tensors that moved."""
    model = trainer.module.model
    before: dict[str, Tensor] = {name: x.clone() for name, x in model.state_dict().items()}
    for step in range(steps):
        trainer.step([make_batch()], StepContext(epoch=epoch + step / 10))
    return {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}


def test_an_encoder_rests_until_its_epoch_with_its_running_statistics() -> None:
    trainer = make(unfreeze_at_epoch={"image": 2})
    for epoch in (0.0, 1.0):
        names = moved(trainer, epoch)
        assert not [name for name in names if name.startswith("encoders.image")]
        assert [name for name in names if name.startswith("encoders.text")]
        assert not trainer.module.model.encoders["image"].training
    assert all(p.requires_grad for p in trainer.module.model.encoders["image"].parameters())
    names = moved(trainer, 2.0)
    image = {f"encoders.image.{n}" for n in trainer.module.model.encoders["image"].state_dict()}
    assert image <= names  # weights and running statistics alike
    assert trainer.module.model.encoders["image"].training


def test_an_encoder_that_has_thawed_learns_as_without_the_setting() -> None:
    plain, waits = make(), make(unfreeze_at_epoch={"image": 1})
    for trainer in (plain, waits):
        torch.manual_seed(1)  # of dropout
        for step in range(2):
            trainer.step([make_batch()], StepContext(epoch=1 + step / 10))
    theirs = waits.module.state_dict()
    for name, tensor in plain.module.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_layers_thaw_one_after_another_from_the_last_one_down() -> None:
    trainer = make(gradual_unfreeze={"text": 2})
    text = trainer.module.model.encoders["text"]
    numbers = {f"encoders.text.{name}": n for name, n in layer_numbers(text).items()}
    for epoch, lowest in ((0, 4), (1, 4), (2, 3), (3, 3), (4, 2), (6, 1), (8, 0)):
        names = moved(trainer, epoch)
        layers = {numbers[name] for name in names & numbers.keys()}
        assert layers == set(range(lowest, 4)), epoch
    assert all(module.training for module in text.modules())


def test_both_settings_count_from_the_epoch_and_what_is_frozen_for_good_stays_so() -> None:
    trainer = make(gradual_unfreeze={"image": 1}, unfreeze_at_epoch={"image": 3})
    top = list(trainer.module.model.encoders["image"].parameters())[-1]
    first = next(trainer.module.model.encoders["image"].parameters())
    assert trainer.freeze_plan.unfreezing.span([top]) == [3, 3]
    assert trainer.freeze_plan.unfreezing.span([first, top]) == [3, 7]  # five layers
    encoders = {"text": {"name": "chars", "num_layers": 3, "freeze": "all_but_last_2"}}
    model = create_model("concat", encoders, 3)
    text = model.encoders["text"]
    resting = Unfreezing(model, OptimConfig(gradual_unfreeze={"text": 1}), epochs=4)
    counts = []
    for epoch in range(4):
        assert resting.enter(epoch)
        assert not resting.enter(epoch)
        text.train()
        assert not text.embed.training
        counts.append(len(resting.resting))
    assert counts == [26, 12, 0, 0]  # two layers of 12 tensors and the last norm
    assert not text.transformer.layers.layers[0].training
    assert text.transformer.layers.layers[1].training


@pytest.mark.parametrize("setting", ["unfreeze_at_epoch", "gradual_unfreeze"])
def test_an_encoder_that_would_never_learn_is_an_error(setting: str) -> None:
    with pytest.raises(FusionZooError, match=rf"{setting}\.text 12: the run ends after 12"):
        make(**{setting: {"text": 12}})


def held_bytes(trainer: Trainer, epoch: float) -> int:
    """Return the size of the activations that a step holds for its backward pass."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trainer.step([make_batch()], StepContext(epoch=epoch))
    parameters = {p.untyped_storage().data_ptr() for p in trainer.module.parameters()}
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)


@pytest.mark.parametrize("name", ["image", "text"])
def test_layers_below_the_first_trained_one_hold_no_activations(name: str) -> None:
    waits, plain = make(gradual_unfreeze={name: 1}), make()
    by_epoch = [held_bytes(waits, epoch) for epoch in range(6)]
    assert by_epoch == sorted(by_epoch)
    assert by_epoch[0] < by_epoch[1] < by_epoch[2] < by_epoch[-1]
    assert by_epoch[-1] == held_bytes(plain, 0.0)


def test_a_copy_thaws_by_itself() -> None:
    """Some strategies train a copy of the model for a while."""
    trainer = make(gradual_unfreeze={"image": 1})
    moved(trainer, 1.0)
    copy = trainer.copy(lambda module: None)
    image = copy.module.model.encoders["image"]
    assert {f"encoders.image.{name}" for name, _ in image.named_parameters()} <= moved(copy, 9.0)
    still = [n for n in moved(trainer, 1.0) if n.startswith("encoders.image.net.conv1")]
    assert still == []
