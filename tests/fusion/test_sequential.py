"""`multimodn` and `medfuse`: one modality after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, aligned, close, context, copy, made

TARGET = torch.arange(8) % 4

# ---- multimodn


def test_a_prediction_depends_on_the_present_modalities_before_it_only() -> None:
    fusion, x = made("multimodn"), features(full(2))
    leaves = {m: f._replace(pooled=f.pooled.requires_grad_()) for m, f in x.items()}
    steps = fusion(leaves).extra["steps"]
    inputs = [f.pooled for f in leaves.values()]
    for k in range(4):
        slopes = torch.autograd.grad(
            steps[:, k].square().sum(), inputs, retain_graph=True, allow_unused=True
        )
        reached = [g is not None and bool((g != 0).any()) for g in slopes]
        assert reached == [n < k for n in range(3)]
    fusion, x = made("multimodn"), features(full(3))
    before_last = fusion(x).extra["steps"][:, 2]
    assert torch.equal(fusion(keep_only(x, "image", "text")).logits, before_last)
    fewer = made("multimodn", {m: WIDTHS[m] for m in ("image", "audio")})
    fewer.load_state_dict({k: fusion.state_dict()[k] for k in fewer.state_dict()})
    close(fusion(keep_only(x, "image", "audio")).logits, fewer(x).logits)
    nothing = fusion(keep_only(x))
    close(nothing.embedding, fusion.state.expand(3, -1))


def test_updates_that_keep_the_state_are_a_sum_in_any_order() -> None:
    fusion = made("multimodn")
    for name, update in fusion.update.items():
        with torch.no_grad():
            update.weight[:, 32:] = torch.eye(8)
            fusion.read[name].bias.fill_(100.0)  # its ReLU is linear
    x = features(full(4))
    wanted = fusion.state
    for name, update in fusion.update.items():
        read = fusion.read[name](x[name].pooled)
        wanted = wanted + read @ update.weight[:, :32].T + update.bias
    close(fusion(x).embedding, wanted)
    other = copy(fusion, made("multimodn", dict(reversed(WIDTHS.items()))))
    close(other(x).embedding, wanted)


def test_training_draws_an_order_for_each_sample_and_evaluation_does_not() -> None:
    fusion, x = made("multimodn", dropout=0.0), features(patterns(3))
    fixed = made("multimodn", dropout=0.0, shuffle=False)
    copy(fusion, fixed)
    wanted = fusion(x).extra["steps"]
    close(fixed.train()(x).extra["steps"], wanted)
    torch.manual_seed(0)
    same = torch.stack([(fusion.train()(x).logits == wanted[:, -1]).all(1) for _ in range(40)])
    several = patterns(3).sum(1) > 1
    assert same[:, ~several].all()
    assert not same[:, several].all(0).any() and same[:, several].any(0).all()
    assert torch.equal(fusion.eval()(x).extra["steps"], wanted)


@pytest.mark.parametrize("training", [False, True])
def test_the_loss_is_the_mean_over_the_steps_that_happened(training: bool) -> None:
    fusion, x = made("multimodn", dropout=0.0, encode=0.7, change=0.3), features(patterns(3))
    output = fusion.train(training)(x)
    steps, states = output.extra["steps"], output.extra["states"]
    found, criterion = fusion.loss(output, TARGET, context(8)), context(1).criterion
    for row in range(8):
        here = [0, *(k + 1 for k in range(3) if output.extra["happened"][row, k])]
        losses = [criterion(steps[row, k][None], TARGET[row : row + 1])[0] for k in here]
        moves = [(states[row, k] - states[row, k - 1]).square().mean() for k in here[1:]]
        wanted = 0.7 * torch.stack(losses).mean()
        wanted = wanted + (0.003 * torch.stack(moves).mean() if moves else 0)
        close(found[row], wanted, 1e-6)


# ---- medfuse


def test_the_masked_lstm_is_an_lstm_on_the_shortened_sequence_in_its_order() -> None:
    fusion, x = made("medfuse"), features(patterns(3)[:-1])
    lstm = nn.LSTM(8, 8, batch_first=True).double()
    lstm.load_state_dict({f"{k}_l0": v for k, v in fusion.cell.state_dict().items()})
    a = torch.stack([*aligned(fusion, x).values()], dim=1)
    for row, here in enumerate(patterns(3)[:-1]):
        close(fusion(x).embedding[row], lstm(a[row : row + 1, here])[1][0][0, 0])
    fusion, x = made("medfuse"), features(full(3))
    other = copy(fusion, made("medfuse", dict(reversed(WIDTHS.items()))))
    assert not torch.allclose(other(x).logits, fusion(x).logits, atol=1e-4)


def test_an_lstm_without_memory_shows_the_last_present_modality() -> None:
    fusion = made("medfuse")
    with torch.no_grad():
        fusion.cell.weight_hh.zero_()
        fusion.cell.bias_ih[8:16] = -1e9  # the forget gate
    x = features(full(3))
    for names in (("image", "text"), ("text",)):
        close(fusion(keep_only(x, *names)).logits, fusion(keep_only(x, names[-1])).logits)
