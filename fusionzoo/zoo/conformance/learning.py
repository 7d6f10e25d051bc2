"""What a fusion learns in a few hundred steps, from one modality or from two together."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionzoo.fusion import Fusion
from fusionzoo.structures import Features, StepContext

from . import absence
from .checks import Checks
from .fusions import Inputs, Maker, entropy

CHECKS: Checks[Maker] = Checks()


@CHECKS.add
def one_modality_alone_is_enough_to_learn(make: Maker) -> None:
    """Tried: 150 steps per phase on two noisy bits, of which the first is the target."""
    assert accuracy(make, "unique") > 0.95, (
        f"reaches {accuracy(make, 'unique'):.2f} on one modality's bit"
    )


def accuracy(make: Maker, task: str, steps: int = 150) -> float:
    """Train on two noisy bits, one per modality; return the accuracy on fresh samples.

    `unique`: the target is the first bit. `xor`: whether the bits differ, which neither alone
    predicts, so a sum of unimodal logits stays at chance. Every phase gets `steps` steps; the last
    one ends early once the accuracy is 1.
    """
    torch.manual_seed(0)
    fusion = make({"a": 4, "b": 4}, 16, 2).float().train()
    rows, target = torch.arange(128), torch.zeros(128, dtype=torch.int64)
    memory = fusion.prepare(target)
    for number, phase in enumerate(fusion.phases):
        learning = [p for n, p in fusion.named_parameters() if n.startswith(phase.trains)]
        optimizer = torch.optim.Adam(learning, lr=1e-2)
        for step in range(steps):
            inputs, target = _bits(task, 128)
            context = StepContext(
                rows=rows, epoch=step / 10, phase=number, criterion=entropy, memory=memory
            )
            loss = fusion.loss(fusion(inputs), target, context).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = number == len(fusion.phases) - 1
            if last and step % 20 == 19 and _accuracy(fusion, task) == 1:
                break
    return _accuracy(fusion, task)


@torch.no_grad()
def _accuracy(fusion: Fusion, task: str) -> float:
    inputs, target = _bits(task, 1000)
    right = fusion.eval()(inputs).logits.argmax(-1) == target
    fusion.train()
    return right.double().mean().item()


def _bits(task: str, rows: int) -> tuple[Inputs, Tensor]:
    bits = torch.randint(0, 2, (rows, 2))
    inputs = {}
    for column, name in enumerate(("a", "b")):
        signal = (2.0 * bits[:, column, None] - 1) * torch.tensor([1.0, -1.0, 0.5, 0.0])
        pooled = signal + 0.1 * torch.randn(rows, 4)
        inputs[name] = Features(pooled[:, None], torch.ones(rows, 1, dtype=torch.bool), pooled)
    target = bits[:, 0] if task == "unique" else (bits[:, 0] != bits[:, 1]).long()
    return inputs, target


CHECKS.add(absence.an_uninformative_modality_can_be_dropped)
CHECKS.add(absence.missing_modalities_never_cost_more_than_all_knowledge)
