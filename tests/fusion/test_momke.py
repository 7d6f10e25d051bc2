"""`momke`: every expert reads every modality."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusionzoo.fusion import Fusion
from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import Inputs, features, full, patterns
from helpers.oracle import WIDTHS, close, context, made

TARGET = torch.arange(8) % 4


def authors_expert(fusion: Fusion, expert: str, x: Tensor) -> Tensor:
    """Transcribe an expert of the authors' code on one sequence (T, D) without padding."""
    for layer in fusion.experts[expert]:
        q = layer.query(x).unflatten(-1, (2, -1)).movedim(1, 0)
        key, value = layer.key_value(x).chunk(2, dim=-1)
        k, v = (z.unflatten(-1, (2, -1)).movedim(1, 0) for z in (key, value))
        attention = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)
        y = (attention @ v).movedim(0, 1).flatten(1)
        x = x + (y + layer.mlp(y))
    return x


def streams(fusion: Fusion, x: Inputs, row: int) -> Tensor:
    """Return the mean of X_n of each modality of a sample, zeros where absent: (M, D)."""
    means = []
    for name, own in x.items():
        tokens = fusion.project[name](own.tokens[row][own.mask[row]])
        if not len(tokens):
            means.append(torch.zeros(8).double())
            continue
        weights = fusion.router[name](tokens).softmax(-1)
        experts = torch.stack([authors_expert(fusion, e, tokens) for e in fusion.experts], dim=1)
        means.append((weights[..., None] * experts).sum(1).mean(0))
    return torch.stack(means)


def test_it_is_the_authors_mixture_for_every_subset() -> None:
    fusion, x = made("momke"), features(patterns(3))
    found = fusion(x)
    for row in range(7):
        h = streams(fusion, x, row).flatten()
        wanted = fusion.join(h + fusion.mix(h).relu())
        close(found.embedding[row], wanted)
        close(found.logits[row], fusion.head(wanted))
    close(found.embedding[7], fusion.null)


def test_a_router_that_keeps_to_its_own_expert_leaves_unimodal_transformers() -> None:
    fusion, x = made("momke"), features(full(3))
    for number, router in enumerate(fusion.router.values()):
        nn.init.zeros_(router[-1].weight)
        with torch.no_grad():
            router[-1].bias.copy_(1e4 * torch.eye(3)[number])
    for part in (fusion.mix.weight, fusion.mix.bias):
        nn.init.zeros_(part)
    found = fusion(x)
    for row in range(3):
        alone = [
            authors_expert(fusion, m, fusion.project[m](f.tokens[row][f.mask[row]])).mean(0)
            for m, f in x.items()
        ]
        close(found.embedding[row], fusion.join(torch.cat(alone)))  # W = 0: a concatenation
        logits = [fusion.expert_heads[m](h) for m, h in zip(WIDTHS, alone, strict=True)]
        close(found.extra["expert_logits"][row], torch.stack(logits))
    close(found.extra["routing"], torch.eye(3).double().expand(3, 3, 3))


def test_equal_experts_make_the_router_irrelevant_and_modalities_meet_after_them() -> None:
    fusion, x = made("momke"), features(full(3))
    first, *others = fusion.experts.values()
    for expert in others:
        expert.load_state_dict(first.state_dict())
    before = fusion(x).logits
    for parameter in fusion.router.parameters():
        nn.init.normal_(parameter)
    close(fusion(x).logits, before)
    fusion, x = made("momke"), features(full(2))
    leaves: Inputs = {m: f._replace(tokens=f.tokens.requires_grad_()) for m, f in x.items()}
    logits = fusion(leaves).extra["expert_logits"][:, 0]  # of the first modality alone
    slopes = torch.autograd.grad(logits.sum(), [f.tokens for f in leaves.values()])
    assert [bool(slope.any()) for slope in slopes] == [True, False, False]


def test_the_first_phase_trains_each_expert_alone_and_the_last_the_fusion() -> None:
    fusion, x = made("momke"), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    losses = [criterion(z, TARGET) for z in output.extra["expert_logits"].unbind(1)]
    here = patterns(3).double()
    wanted = (torch.stack(losses, dim=1) * here).sum(1) / here.sum(1).clamp(min=1)
    close(fusion.loss(output, TARGET, context(8, phase=0))[:-1], wanted[:-1])
    task = criterion(output.logits, TARGET)
    close(fusion.loss(output, TARGET, context(8, phase=1)), task)
    whole = made("momke", expert_share=0.0)
    assert len(whole.phases) == 1 and "expert_logits" not in whole(x).extra
    close(whole.loss(whole(x), TARGET, context(8)), criterion(whole(x).logits, TARGET))


def test_shares_name_the_experts_that_present_modalities_used() -> None:
    fusion, x = made("momke"), features(full(3))
    output = fusion(keep_only(x, "image", "audio"))
    shares = fusion.shares(output)
    assert [*shares] == ["expert of image", "expert of text", "expert of audio"]
    close(torch.stack([*shares.values()]).sum(0), torch.ones(3).double())
    close(shares["expert of text"], output.extra["routing"][:, [0, 2], 1].mean(1))
