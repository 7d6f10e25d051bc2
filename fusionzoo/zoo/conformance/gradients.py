"""A fusion's gradients and own loss: finite, correct, and for every parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionzoo.structures import Features

from .checks import Checks, assert_registered
from .fusions import Maker, build, features, full, loss_of, own_loss, patterns, poison

CHECKS: Checks[Maker] = Checks()


@CHECKS.add
def gradients_stay_finite_and_do_not_reach_what_is_absent(make: Maker) -> None:
    """Tried: NaN in everything absent, every subset, backward through all outputs."""
    fusion = build(make)
    inputs = poison(features(patterns(3)), float("nan"))
    leaves = {
        n: Features(x.tokens.requires_grad_(), x.mask, x.pooled.requires_grad_())
        for n, x in inputs.items()
    }
    loss_of(fusion(leaves)).backward()
    for name, parameter in fusion.named_parameters():
        finite = parameter.grad is None or torch.isfinite(parameter.grad).all()
        assert finite, f"the gradient of {name} is not finite when a modality is absent"
    for name, x in leaves.items():
        for tensor, absent in ((x.tokens, ~x.mask), (x.pooled, ~x.mask.any(1))):
            if tensor.grad is not None:
                assert (tensor.grad[absent] == 0).all(), f"a gradient reaches absent {name}"


@CHECKS.add
def every_parameter_is_registered_and_gets_a_gradient(make: Maker) -> None:
    """Tried: backward through outputs and own loss, in every phase; loose tensors searched for."""
    fusion = build(make)
    assert_registered(fusion)
    inputs = features(patterns(3))
    for phase in range(len(fusion.phases)):
        output = fusion(inputs)
        (loss_of(output) + own_loss(fusion, output, phase).sum()).backward()
    for name, parameter in fusion.named_parameters():
        learns = parameter.grad is not None and bool((parameter.grad != 0).any())
        use = (
            "pass the embedding through self.or_null(...)" if name == "null" else "use or remove it"
        )
        assert learns, f"{name} gets no gradient: {use}"


@CHECKS.add
def its_loss_is_finite_whatever_is_missing(make: Maker) -> None:
    """Tried: its own loss in training mode, every phase, every subset, NaN where absent."""
    fusion = build(make).train()
    for phase in range(len(fusion.phases)):
        inputs = poison(features(patterns(3)), float("nan"))
        torch.manual_seed(0)
        loss = own_loss(fusion, fusion(inputs), phase)
        assert loss.shape == (8,), f"the loss has shape {tuple(loss.shape)}; one per row is (8,)"
        bad = (~torch.isfinite(loss)).nonzero()[:, 0].tolist()
        assert not bad, f"the loss is not finite for presence {patterns(3)[bad[:1]].tolist()}"
        fusion.zero_grad()
        loss.sum().backward()
        for name, parameter in fusion.named_parameters():
            finite = parameter.grad is None or torch.isfinite(parameter.grad).all()
            assert finite, f"the gradient of {name} is not finite in training"
        assert own_loss(fusion, fusion(features(full(0))), phase).shape == (0,), "fails on no rows"


@CHECKS.add
def its_phases_train_every_parameter(make: Maker) -> None:
    """Tried: the prefixes of all phases against the parameters' names."""
    fusion = build(make)
    assert abs(sum(phase.share for phase in fusion.phases) - 1) < 1e-9, "shares do not sum to 1"
    for phase in fusion.phases:
        for prefix in phase.trains:
            known = any(name.startswith(prefix) for name, _ in fusion.named_parameters())
            assert known, f"phase {phase.name!r} trains {prefix!r}, and nothing is called so"
    prefixes = tuple(prefix for phase in fusion.phases for prefix in phase.trains)
    for name, _ in fusion.named_parameters():
        assert name.startswith(prefixes), f"no phase trains {name}"


@CHECKS.add
def gradients_are_the_derivatives(make: Maker) -> None:
    """Tried: torch.autograd.gradcheck on embedding and logits, two modalities."""
    fusion = build(make, 2)
    inputs = features(full(2, 2))
    leaves = [t.clone().requires_grad_() for x in inputs.values() for t in (x.tokens, x.pooled)]

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        output = fusion(
            {
                name: Features(tokens, x.mask, pooled)
                for (name, x), (tokens, pooled) in zip(inputs.items(), pairs, strict=True)
            }
        )
        return output.embedding, output.logits

    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)
