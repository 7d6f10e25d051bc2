"""`pdf`: co-belief, relative calibration, and what its confidence learns from."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusionzoo.fusion.late.pdf import co_belief, relative_calibration
from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, context, copy, made

TARGET = torch.arange(8) % 4


def confidences(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return 0.05 + 0.9 * torch.rand(*shape, generator=draw).double()


def test_shares_of_others_add_up_and_are_the_papers_of_two_modalities() -> None:
    t, present = confidences(8, 3), patterns(3)
    shares = (co_belief(t, present) - t).masked_fill(~present, 0).sum(1)
    close(shares, (present.sum(1) - 1).clamp(min=0).double())
    t = confidences(6, 2)
    logs = t.log()
    wanted = t + logs.flip(1) / logs.sum(1, keepdim=True)
    close(co_belief(t, full(6, 2)), wanted)


def test_belief_rises_with_the_own_confidence_and_falls_with_the_others() -> None:
    t = confidences(1, 3).requires_grad_()
    shares = co_belief(t, full(1)) - t
    for m in range(3):
        (slope,) = torch.autograd.grad(shares[0, m], t, retain_graph=True)
        assert slope[0, m] > 0
        assert all(slope[0, n] < 0 for n in range(3) if n != m)


def test_equal_confidence_is_the_mean_rule() -> None:
    fusion, x = made("pdf", calibrate=False), features(patterns(3))
    for head in fusion.confidence.values():
        nn.init.zeros_(head[-1].weight)
        nn.init.zeros_(head[-1].bias)
    close(fusion(x).logits, copy(fusion, made("late_mean", project=False), strict=False)(x).logits)


def test_calibration_lowers_all_but_the_most_certain_modality() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(6, 3, 4, generator=draw).double()
    certainty = (z.softmax(-1) - 0.25).abs().mean(-1)
    k = relative_calibration(z, full(6))
    for row in range(6):
        best = certainty[row].argmax()
        assert k[row, best] == 1
        for m in range(3):
            others = torch.stack([certainty[row, n] for n in range(3) if n != m]).mean()
            close(k[row, m], (certainty[row, m] / others).clamp(max=1))
    assert (k < 1).any(1).all()
    sure = F.one_hot(torch.arange(4)).double()[None] * 1e3
    close((sure.softmax(-1) - 0.25).abs().mean(-1), torch.full((1, 4), 2 * 3 / 16.0).double())
    assert (relative_calibration(torch.zeros(1, 3, 4).double(), full(1)) == 1).all()
    uniform_beside_sure = torch.stack([torch.zeros(4), sure[0, 0].float()])[None].double()
    assert relative_calibration(uniform_beside_sure, full(1, 2)).tolist() == [[0.0, 1.0]]


def test_a_single_modality_is_its_own_answer() -> None:
    output = made("pdf")(keep_only(features(full(3)), "text"))
    close(output.logits, output.unimodal["text"])


def test_the_fused_loss_teaches_the_confidence_nothing_and_its_own_the_encoder_nothing() -> None:
    fusion, x = made("pdf", project=True).train(), features(full(8))
    fusion(x).logits.square().sum().backward()
    assert all(p.grad is None for p in fusion.confidence.parameters())
    fusion.zero_grad()
    fusion(x).extra["confidence"].sum().backward()
    assert all(p.grad is None for p in fusion.heads.parameters())
    assert all(p.grad is None for p in fusion.project.parameters())
    assert all((p.grad != 0).any() for p in fusion.confidence.parameters())


def test_the_loss_is_that_of_every_classifier_and_the_error_of_the_confidence() -> None:
    fusion, x = made("pdf"), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    wanted = criterion(output.logits, TARGET)
    for column, logits in enumerate(output.unimodal.values()):
        p = logits.softmax(-1)[torch.arange(8), TARGET]
        error = (output.extra["confidence"][:, column] - p).abs()
        wanted += (criterion(logits, TARGET) + error) * patterns(3)[:, column]
    close(fusion.loss(output, TARGET, context(8)), wanted, 1e-6)


def test_without_activations_a_confidence_head_is_one_linear_map() -> None:
    fusion = made("pdf", project=True, linear_confidence=True)
    head = fusion.confidence["text"]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).double()
    middle = head(x[:2].mean(0, keepdim=True))
    close(middle, head(x[:2]).mean(0, keepdim=True))
    assert list(fusion.confidence) == list(WIDTHS)
