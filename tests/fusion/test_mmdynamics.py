"""`mmdynamics`: gates, confidence and the slot of an absent modality."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import Inputs, features, full, patterns
from helpers.oracle import WIDTHS, close, context, made

TARGET = torch.arange(8) % 4


def hidden_of(fusion: Fusion, x: Inputs) -> dict[str, torch.Tensor]:
    """Return f_m of complete samples."""
    gated = {m: fusion.gates[m](f.pooled).sigmoid() * f.pooled for m, f in x.items()}
    return {m: fusion.encode[m](v).relu() for m, v in gated.items()}


@pytest.mark.parametrize("join", [False, True])
def test_it_is_a_sum_of_classifiers_weighted_by_confidence(join: bool) -> None:
    fusion, x = made("mmdynamics", join=join), features(full(4))
    weight, wanted = fusion.head.weight, fusion.head.bias
    if join:
        weight = weight @ fusion.join.weight
        wanted = fusion.head(fusion.join.bias) + weight[:, 24:].sum(1)  # presence bits of all three
    mean = torch.zeros(4, 8).double()
    for column, (name, f) in enumerate(hidden_of(fusion, x).items()):
        part = weight[:, 8 * column : 8 * column + 8]
        wanted = wanted + fusion.confidence[name](f) * (f @ part.T)
        mean = mean + fusion.confidence[name](f) * f / 3
    close(fusion(x).logits, wanted)
    if not join:
        close(fusion(x).embedding, mean)


def test_gates_without_weights_are_half_open_and_are_pushed_to_close() -> None:
    fusion, x = made("mmdynamics", join=True), features(full(4))
    for name in WIDTHS:
        nn.init.zeros_(fusion.gates[name].weight)
        nn.init.zeros_(fusion.gates[name].bias)
    close(fusion(x).extra["openness"], torch.full((4, 3), 0.5, dtype=torch.float64))
    for name in WIDTHS:
        nn.init.constant_(fusion.gates[name].bias, 1e3)
        nn.init.zeros_(fusion.confidence[name].weight)
        nn.init.ones_(fusion.confidence[name].bias)
    encoded = [fusion.encode[m](x[m].pooled).relu() for m in WIDTHS]
    close(fusion(x).embedding, fusion.join(torch.cat([*encoded, torch.ones(4, 3).double()], dim=1)))
    fusion, x = made("mmdynamics"), features(full(4))
    fusion(x).extra["openness"].sum().backward()
    assert all((gate.bias.grad > 0).all() for gate in fusion.gates.values())


def test_an_absent_modality_has_the_mean_of_its_scaled_features() -> None:
    fusion, x = made("mmdynamics", dropout=0.0), features(full(4))
    fusion.train()(x)
    present = {m: fusion.confidence[m](f) * f for m, f in hidden_of(fusion, x).items()}
    scaled = {m: fusion.confidence[m](f) * f for m, f in hidden_of(fusion, x).items()}
    scaled["text"] = scaled["text"].mean(0).expand(4, -1)
    found = fusion.eval()(keep_only(x, "image", "audio"))
    close(found.logits, fusion.head(torch.cat([*scaled.values()], dim=1)))
    close(found.embedding, (present["image"] + present["audio"]) / 2)


def test_a_classifier_is_drawn_towards_its_confidence_unless_that_target_is_detached() -> None:
    slopes = []
    for detach in (False, True):
        fusion, x = made("mmdynamics", detach=detach), features(full(8))
        output = fusion(x)
        bias = fusion.heads["text"].bias
        own = context(8).criterion(output.unimodal["text"], TARGET).sum()
        (wanted,) = torch.autograd.grad(own, bias, retain_graph=True)
        (found,) = torch.autograd.grad(fusion.loss(output, TARGET, context(8)).sum(), bias)
        slopes.append((found - wanted).abs().max())
    assert slopes[0] > 1e-3
    assert slopes[1] < 1e-6


def test_widths_and_ranks_of_layers_are_those_of_the_settings() -> None:
    with pytest.raises(FusionZooError, match="hidden=4, dim=8; they must be equal, or join=true"):
        create_fusion("mmdynamics", WIDTHS, 8, 4, hidden=4)
    assert create_fusion("mmdynamics", WIDTHS, 8, 4, hidden=4, join=True).join.out_features == 8
    fusion = made("mmdynamics", gate_rank=2)
    counts = [sum(p.numel() for p in gate.parameters()) for gate in fusion.gates.values()]
    assert counts == [5 * 2 * 2 + 5, 7 * 2 * 2 + 7, 3 * 2 * 2 + 3]
    with pytest.raises(FusionZooError, match="gate_rank=0"):
        create_fusion("mmdynamics", WIDTHS, 8, 4, gate_rank=0)


@pytest.mark.parametrize("confidence", ["linear", "sigmoid"])
def test_the_loss_is_that_of_its_classifiers_confidences_and_open_gates(confidence: str) -> None:
    fusion, x = made("mmdynamics", confidence=confidence, gate=0.5), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    wanted = criterion(output.logits, TARGET)
    for column, logits in enumerate(output.unimodal.values()):
        p = logits.softmax(-1)[torch.arange(8), TARGET]
        error = (output.extra["confidence"][:, column] - p).square()
        own = criterion(logits, TARGET) + error + 0.5 * output.extra["openness"][:, column]
        wanted = wanted + own * patterns(3)[:, column]
    close(fusion.loss(output, TARGET, context(8)), wanted, 1e-6)
