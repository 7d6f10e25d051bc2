"""`i2moe` and the random numbers that it draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.fusion.base import Draws, RunningMeans
from fusionzoo.fusion.hybrid._interaction import RunningMoments, interaction_losses
from fusionzoo.model import create_model
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, context, copy, made

KINDS = dict.fromkeys(("a", "b"), "vector")
TARGET = torch.arange(8) % 4
BASES = ["concat", "late_mean", "mbt", "tmc"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def tied(base: str) -> Fusion:
    """Return an `i2moe` whose experts all hold the weights of the first."""
    fusion = made("i2moe", base=base)
    for expert in fusion.experts[1:]:
        copy(fusion.experts[0], expert)
    return fusion


@pytest.mark.parametrize("base", BASES)
def test_equal_experts_are_the_base_whatever_the_router_says(base: str) -> None:
    fusion, x = tied(base), features(patterns(3))
    answer, plain = fusion(x), fusion.experts[0](x)
    close(answer.logits, plain.logits)
    close(answer.embedding, plain.embedding)


def test_experts_start_differently_and_a_router_without_weights_averages_them() -> None:
    fusion, x = made("i2moe", base="mbt"), features(patterns(3))
    for parameter in fusion.router[-1].parameters():
        torch.nn.init.zeros_(parameter)
    close(fusion(x).logits, torch.stack([expert(x).logits for expert in fusion.experts]).mean(0))
    close(fusion(x).extra["expert_weights"], torch.full((8, 5), 0.2, dtype=torch.float64))
    fusion = create_fusion("i2moe", WIDTHS, 8, 4)
    first, second = (dict(fusion.experts[n].named_parameters()) for n in (0, 1))
    assert any(not torch.equal(x, second[name]) for name, x in first.items())


def test_synergy_and_redundancy_of_the_same_answers_add_up_to_one_and_ignore_their_scale() -> None:
    answers, perturbed = draw(6, 1, 4).expand(6, 5, 4), draw(6, 1, 3, 4).expand(6, 5, 3, 4)
    losses = interaction_losses(answers, perturbed, full(6))
    close(losses[:, 3] + losses[:, 4], torch.ones(6).double())
    scaled = interaction_losses(3 * answers, 0.2 * perturbed, full(6))
    close(scaled[:, 3:], losses[:, 3:])
    assert not torch.allclose(scaled[:, :3], losses[:, :3])


def test_an_expert_that_reads_one_modality_is_judged_by_losing_it() -> None:
    answers, perturbed = draw(6, 5, 4), draw(6, 5, 3, 4).clone()
    for i in range(3):
        for n in range(3):
            if n != i:
                perturbed[:, i, n] = answers[:, i]  # the others change nothing
    losses = interaction_losses(answers, perturbed, full(6))
    for i in range(3):
        gap = (answers[:, i] - perturbed[:, i, i]).norm(dim=-1)
        close(losses[:, i], (1 - gap).clamp(min=0), 1e-6)


def test_losses_leave_out_what_is_absent_and_are_squares_of_a_single_number() -> None:
    present = patterns(3)
    answers, perturbed = draw(8, 5, 4), draw(8, 5, 3, 4)
    losses = interaction_losses(answers, perturbed, present)
    other = perturbed.masked_fill(~present[:, None, :, None], 7.0)
    close(interaction_losses(answers, other, present), losses)
    alone = present.sum(1) < 2
    assert (losses[alone, :3] == 0).all()
    assert (losses[-1] == 0).all()
    answers, perturbed = draw(6, 5, 1), draw(6, 5, 3, 1)
    losses = interaction_losses(answers, perturbed, full(6))
    change = (answers[:, :, None] - perturbed)[..., 0].square()
    close(losses[:, 3], -change[:, 3].clamp(max=1).mean(1))
    close(losses[:, 4], change[:, 4].mean(1))
    hinge = (change[:, 0, 1:] - change[:, 0, :1] + 1).clamp(min=0)
    close(losses[:, 0], hinge.mean(1))


def test_noise_replaces_one_modality_at_a_time_and_only_in_training() -> None:
    fusion, x = made("i2moe", base="late_mean"), features(full(4))
    assert "perturbed" not in fusion(x).extra
    output = fusion.train()(x)
    assert output.extra["perturbed"].shape == (4, 5, 3, 4)
    expert = fusion.experts[0]
    change = 3 * (output.extra["perturbed"][:, 0] - output.extra["expert_logits"][:, 0, None])
    noise = fusion._noise(x)  # another draw; its own votes are not those of the features
    assert not torch.allclose(noise["text"].pooled, x["text"].pooled)
    votes = expert(x).unimodal
    for column, name in enumerate(WIDTHS):  # a mean of three votes: one of them was replaced
        seen = change[:, column] + votes[name]
        weight = expert.heads[name].weight @ expert.project[name].weight
        assert torch.linalg.matrix_rank(torch.cat([weight, seen.T], dim=1)) <= 4


def test_the_noise_has_the_moments_of_real_tokens_and_present_rows() -> None:
    torch.manual_seed(0)
    fusion = create_fusion("i2moe", {"a": 3, "b": 2}, 8, 4).double()
    x = features(full(4000, 2))
    shifted = {
        name: f._replace(tokens=5 + 2 * f.tokens[..., :w], pooled=3 - 4 * f.pooled[..., :w])
        for (name, w), f in zip({"a": 3, "b": 2}.items(), x.values(), strict=True)
    }
    for _ in range(3):
        noise = fusion._noise(shifted)
    close(noise["a"].tokens.mean(), torch.tensor(5.0).double(), 0.05)
    close(noise["a"].tokens.std(), torch.tensor(2.0).double(), 0.05)
    close(noise["b"].pooled.mean(), torch.tensor(3.0).double(), 0.2)
    close(noise["b"].pooled.std(), torch.tensor(4.0).double(), 0.2)
    x = features(patterns(3))
    moments = RunningMoments(WIDTHS).double()
    tokens = {m: f.tokens.masked_fill(~f.mask[..., None], 0) for m, f in x.items()}
    pooled = {m: f.pooled.masked_fill(~f.mask.any(1)[:, None], 0) for m, f in x.items()}
    moments.observe(tokens, pooled, x)
    for name, f in x.items():
        for kind, rows in (("tokens", f.tokens[f.mask]), ("pooled", f.pooled[f.mask.any(1)])):
            mean, std = moments.of(f"{name}_{kind}")
            close(mean, rows.mean(0))
            close(std, rows.std(0, unbiased=False))


def test_running_means_of_the_base_learn_from_features_and_not_from_noise() -> None:
    fusion, x = made("i2moe", base="mlb").train(), features(full(4))
    fusion(x)
    plain = made("mlb").train()
    plain(x)
    (wanted,) = (m for m in plain.modules() if isinstance(m, RunningMeans))
    for expert in fusion.experts:
        (means,) = (m for m in expert.modules() if isinstance(m, RunningMeans))
        assert means.training
        close(means.mean("text"), wanted.mean("text"))


@pytest.mark.parametrize("base", ["tmc", "qmf", "fuse_moe", "misa"])
def test_the_loss_of_the_base_is_added_for_each_expert(base: str) -> None:
    fusion, x = made("i2moe", base=base, interaction=0.0), features(patterns(3))
    memory = fusion.prepare(TARGET)
    output, wanted = fusion(x), torch.zeros(8).double()
    for number, expert in enumerate(fusion.experts):
        own = None if memory is None else memory[number]
        wanted += expert.loss(expert(x), TARGET, context(8, memory=own)) / 5
    wanted += context(8).criterion(output.logits, TARGET)
    close(fusion.loss(output, TARGET, context(8, memory=memory)), wanted, 1e-6)
    assert fusion.classes_only == fusion.experts[0].classes_only


def test_the_loss_is_the_task_and_a_share_of_every_experts() -> None:
    fusion, x = made("i2moe", interaction=0.5).train(), features(patterns(3))
    output = fusion(x)
    extra = output.extra
    parts = interaction_losses(extra["expert_logits"], extra["perturbed"], extra["present"])
    wanted = context(8).criterion(output.logits, TARGET) + 0.1 * parts.sum(1)
    close(fusion.loss(output, TARGET, context(8)), wanted, 1e-6)


def test_a_model_shows_the_weights_of_each_sample() -> None:
    encoders = {name: {"name": "vector/identity", "in_dim": 3} for name in ("a", "b")}
    samples = [{"a": [1.0, 2.0, 3.0], "b": [0.5, 0.0, 1.0]}, {"a": [3.0, 2.0, 1.0]}]

    def shown(fusion: str) -> dict[str, Tensor]:
        model = create_model({"name": fusion, "dim": 8}, encoders, 2, kinds=KINDS)
        return model.weights(samples)

    experts = shown("i2moe")
    assert [*experts] == ["uniqueness of a", "uniqueness of b", "synergy", "redundancy"]
    close(torch.stack([*experts.values()]).sum(0), torch.ones(2), 1e-6)
    assert shown("gmu")["b"][1] == 0
    with pytest.raises(FusionZooError, match="fusion 'mbt' has no weights of its modalities"):
        shown("mbt")


def test_draws_are_uniform_and_normal_and_unrelated_to_one_another() -> None:
    torch.manual_seed(0)
    draws = Draws()
    first, second = draws.uniform(20_000), draws.uniform(20_000)
    assert first.min() > 0 and first.max() < 1
    for x in (first, second):
        assert abs(x.mean() - 0.5) < 4 / math.sqrt(12 * 20_000)
        counts = torch.histc(x, 20, 0, 1)
        assert ((counts - 1000).square() / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    pairs = torch.stack([first[:-1], first[1:], second[:-1]])
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 4 / math.sqrt(20_000)
    normal = draws.normal(20_000).double()
    assert abs(normal.mean()) < 4 / math.sqrt(20_000)
    assert abs(normal.square().mean() - 1) < 4 * math.sqrt(2 / 20_000)
    assert abs(normal.pow(4).mean() - 3) < 4 * math.sqrt(96 / 20_000)


def test_draws_neither_read_nor_move_the_global_generator_and_a_checkpoint_restores_them() -> None:
    draws = Draws()
    draws.normal(3)
    state = {name: x.clone() for name, x in draws.state_dict().items()}
    before = torch.get_rng_state()
    wanted = draws.normal(2, 5)
    assert torch.equal(torch.get_rng_state(), before)
    other = Draws()
    other.load_state_dict(state)
    assert torch.equal(other.normal(2, 5), wanted)
