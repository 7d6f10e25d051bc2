"""The early fusions are what their formulas say."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from torch import nn

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features, keep_only
from fusionzoo.testing.fusions import Inputs, features, full, patterns
from helpers.oracle import TWO, WIDTHS, aligned, close, context, copy, given, made


def pooled(x: dict[str, Features]) -> list[torch.Tensor]:
    return [x[m].pooled for m in x]


def test_the_sum_is_the_mean_times_the_number_present() -> None:
    total, mean, x = made("sum"), made("mean"), features(patterns(3)[:-1])
    copy(total, mean)
    count = patterns(3)[:-1].sum(1, keepdim=True)
    close(total(x).embedding, count * mean(x).embedding)
    scaled = copy(total, made("sum", root_scale=True))
    close(scaled(x).embedding, total(x).embedding / count.double().sqrt())


def test_the_sum_is_linear_concatenation() -> None:
    total, concat = made("sum"), made("concat", hidden=(), presence_bits=False)
    x = features(full(4))
    with torch.no_grad():
        concat.mlp[0].weight.copy_(torch.cat([total.project[m].weight for m in WIDTHS], dim=1))
        concat.mlp[0].bias.copy_(sum(total.project[m].bias for m in WIDTHS))
    close(concat(x).embedding, total(x).embedding)


def test_the_maximum_takes_the_largest_and_teaches_only_it() -> None:
    fusion, x = made("max"), features(full(4))
    a = torch.stack(list(aligned(fusion, x).values()))
    close(fusion(x).embedding, a.max(0).values)
    same = given(**dict.fromkeys(("image", "text"), torch.randn(3, 5).double()))
    twins = made("max", {"image": 5, "text": 5})
    twins.project["text"].load_state_dict(twins.project["image"].state_dict())
    twins(same).embedding.sum().backward()
    image, text = ((twins.project[m].bias.grad != 0).any() for m in ("image", "text"))
    assert image != text


def test_repeating_a_modality_changes_the_sum_but_not_mean_and_maximum() -> None:
    x = torch.randn(3, 5).double()
    for name, kept in (("sum", False), ("mean", True), ("max", True)):
        one, two = made(name, {"image": 5}), made(name, {"image": 5, "text": 5})
        with torch.no_grad():
            for m in ("image", "text"):
                two.project[m].load_state_dict(one.project["image"].state_dict())
        same = torch.allclose(two(given(image=x, text=x)).embedding, one(given(image=x)).embedding)
        assert same == kept, name


def test_film_scales_the_base_by_one_plus_gamma_and_shifts_it() -> None:
    fusion, x = create_fusion("film", WIDTHS, 8, 4).double(), features(full(4))
    base = x["image"].pooled @ fusion.project.weight.T + fusion.project.bias
    assert torch.equal(fusion(x).embedding, base)
    wanted = base
    with torch.no_grad():
        for m, condition in fusion.conditions.items():
            condition.weight[8:].normal_()
            condition.bias[8:].normal_()
            wanted = wanted + x[m].pooled @ condition.weight[8:].T + condition.bias[8:]
    close(fusion(x).embedding, wanted)
    fusion, x = made("film", base="text"), features(full(2))
    base = x["text"].pooled @ fusion.project.weight.T + fusion.project.bias
    both = sum(x[m].pooled @ c.weight.T + c.bias for m, c in fusion.conditions.items())
    close(fusion(x).embedding, (1 + both[:, :8]) * base + both[:, 8:])


def outer(x: dict[str, Features]) -> torch.Tensor:
    """The outer product of all [1; x_m] of one sample, flattened."""
    ones = [torch.cat([torch.ones(1).double(), x[m].pooled[0]]) for m in x]
    return reduce(lambda a, b: torch.outer(a, b).flatten(), ones)


def test_the_tensor_holds_every_lower_order_and_multiplicative_is_linear_on_it() -> None:
    fusion, seen = made("tfn", TWO), []
    fusion.mlp[0].register_forward_hook(lambda _m, i, _o: seen.append(i[0]))
    x = features(full(1, 2))
    fusion(x)
    table = seen[0].reshape(6, 8)
    close(table.flatten(), outer(x))
    close(table[0, 0], torch.tensor(1.0).double())
    close(table[1:, 0], x["image"].pooled[0])
    close(table[0, 1:], x["text"].pooled[0])
    close(table.sum(), (1 + x["image"].pooled.sum()) * (1 + x["text"].pooled.sum()))
    fusion, x = made("multiplicative", TWO), features(full(1, 2))
    close(fusion(x).embedding[0], outer(x) @ fusion.forms[0].reshape(-1, 8))


def test_multiplicative_is_bilinear_with_its_tensor_as_second_difference() -> None:
    fusion = made("multiplicative", TWO)

    def f(i: int | None, j: int | None) -> torch.Tensor:
        x, y = torch.zeros(1, 5).double(), torch.zeros(1, 7).double()
        if i is not None:
            x[0, i] = 1
        if j is not None:
            y[0, j] = 1
        return fusion(given(image=x, text=y)).embedding[0]

    second = f(2, 3) - f(2, None) - f(None, 3) + f(None, None)
    close(second, fusion.forms[0][3, 4])


def test_multiplicative_pairs_add_up() -> None:
    fusion, x = made("multiplicative", order="pairwise"), features(full(1))
    names = list(WIDTHS)
    pairs = [(0, 1), (0, 2), (1, 2)]
    wanted = sum(
        outer({names[i]: x[names[i]], names[j]: x[names[j]]}) @ form.reshape(-1, 8)
        for (i, j), form in zip(pairs, fusion.forms, strict=True)
    )
    close(fusion(x).embedding[0], wanted)


@pytest.mark.parametrize("name", ["tfn", "multiplicative"])
def test_a_product_above_the_budget_is_refused_with_the_width_that_fits(name: str) -> None:
    dims = {"image": 512, "text": 384, "audio": 256}
    with pytest.raises(FusionZooError) as caught:
        create_fusion(name, dims, 128, 4, proj_dim=512, budget=2_000_000)
    assert "above budget=2,000,000" in str(caught.value)
    fits = int(str(caught.value).split("proj_dim=")[1].split()[0])
    assert (fits + 1) ** 3 * 128 <= 2_000_000 < (fits + 2) ** 3 * 128
    create_fusion(name, dims, 128, 4, proj_dim=fits, budget=2_000_000)


def test_mlb_is_a_product_of_tanh_and_without_it_mfb_of_one_factor() -> None:
    mfb, x = made("mfb", width=12, k=1, normalise=False), features(patterns(3))
    mlb = copy(mfb, made("mlb", width=12, activation="none"))
    close(mfb(x).logits, mlb(x).logits)
    fusion, x = made("mlb", width=6), features(full(3))
    maps = fusion.factors.maps
    each = [(x[m].pooled @ maps[m].weight.T + maps[m].bias).tanh() for m in x]
    close(fusion(x).embedding, fusion.out(each[0] * each[1] * each[2]))


def test_linear_mfb_is_the_bilinear_form_of_its_factors() -> None:
    fusion = made("mfb", TWO, width=6, k=3, normalise=False)
    with torch.no_grad():
        for m in TWO:
            fusion.factors.maps[m].bias.zero_()
    x = features(full(4, 2))
    u, v = (fusion.factors.maps[m].weight.reshape(6, 3, -1) for m in TWO)
    form = torch.einsum("oki,okj->oij", u, v)
    z = torch.einsum("bi,oij,bj->bo", x["image"].pooled, form, x["text"].pooled)
    close(fusion(x).embedding, fusion.out(z))


def test_mfh_of_order_one_is_mfb_and_its_block_i_is_of_degree_i() -> None:
    mfb, x = made("mfb", width=6, k=3), features(patterns(3))
    mfh = made("mfh", width=6, k=3, order=1)
    mfh.load_state_dict(
        {k.replace("factors.", "factors.0."): v for k, v in mfb.state_dict().items()}
    )
    close(mfh(x).logits, mfb(x).logits)
    fusion = made("mfh", width=6, k=3, normalise=False)
    with torch.no_grad():
        for block in fusion.factors:
            for m in WIDTHS:
                block.maps[m].bias.zero_()
    seen: list[torch.Tensor] = []
    fusion.out.register_forward_hook(lambda _m, i, _o: seen.append(i[0]))
    x = features(full(2))
    fusion(x)
    fusion({**x, "image": x["image"]._replace(pooled=3 * x["image"].pooled)})
    close(seen[1][:, :6], 3 * seen[0][:, :6])
    close(seen[1][:, 6:], 9 * seen[0][:, 6:])


def test_block_with_one_chunk_and_no_norm_is_mutan() -> None:
    block, x = made("block", width=6, chunks=1, rank=3, normalise=False), features(patterns(3))
    mutan = made("mutan", width=6, rank=3)
    mutan.load_state_dict(
        {k.replace("slices.0.", "slices."): v for k, v in block.state_dict().items()}
    )
    close(block(x).logits, mutan(x).logits)


def test_mutan_is_a_sum_of_products_of_maps() -> None:
    fusion, x = made("mutan", width=6, rank=3), features(full(2))
    maps, weight, bias = fusion.factors.maps, fusion.slices.weight, fusion.slices.bias
    z = torch.zeros(2, 6).double()
    for r in range(3):
        part = torch.ones(2, 6).double()
        for number, m in enumerate(WIDTHS):
            y = x[m].pooled @ maps[m].weight.T + maps[m].bias
            part = part * (y @ weight[number, 0, :, r::3] + bias[number, 0, r::3])
        z = z + part
    close(fusion(x).embedding, fusion.out(z))


def test_chunks_do_not_mix_and_have_unit_length() -> None:
    fusion = made("block", width=10, chunks=4, rank=2)  # chunks of 3, 3, 3 and 1
    x = torch.randn(1, 3, 10).double().requires_grad_()
    z = fusion.chunks(x)
    for chunk in z.split([3, 3, 3, 1], dim=1):
        close(chunk.norm(), torch.tensor(1.0).double())
    (gradient,) = torch.autograd.grad(z[0, 3:6].sum(), x)
    assert (gradient[..., :3] == 0).all()
    assert (gradient[..., 6:] == 0).all()
    assert (gradient[..., 3:6] != 0).any()


@pytest.mark.parametrize("dims", [TWO, WIDTHS])
def test_mcb_is_the_count_sketch_of_the_outer_product(dims: dict[str, int]) -> None:
    fusion = made("mcb", dims, sketch_dim=11, with_one=False)  # odd: irfft must be told
    x = features(full(2, len(dims)))
    z = fusion.sketch({m: x[m].pooled for m in dims})
    wanted = torch.zeros(2, 11).double()
    for index in torch.cartesian_prod(*(torch.arange(w) for w in dims.values())).tolist():
        bucket = sum(
            int(fusion.get_buffer(f"bucket_{m}")[i]) for m, i in zip(dims, index, strict=True)
        )
        value = torch.ones(2).double()
        for m, i in zip(dims, index, strict=True):
            value = value * fusion.get_buffer(f"sign_{m}")[i] * x[m].pooled[:, i]
        wanted[:, bucket % 11] += value
    close(z, wanted)


def test_sketches_estimate_the_product_of_inner_products() -> None:
    """Over 4,000 hashes, within four standard errors."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, w, generator=draw).double() for w in (5, 7))
    estimates = []
    for seed in range(4000):
        fusion = create_fusion("mcb", TWO, 1, 1, sketch_dim=16, with_one=False, hash_seed=seed)
        z = fusion.sketch({"image": x, "text": y})
        estimates.append((z[0] * z[1]).sum())
    found = torch.stack(estimates)
    wanted = (x[0] @ x[1]) * (y[0] @ y[1])
    assert (found.mean() - wanted).abs() < 4 * found.std() / math.sqrt(len(found))


def test_hashes_are_kept_by_half_precision_and_differ_between_modalities() -> None:
    fusion = create_fusion("mcb", {"a": 9, "b": 9}, 8, 4)
    before = fusion.get_buffer("bucket_a").clone()
    fusion.half()
    assert torch.equal(fusion.get_buffer("bucket_a"), before)
    assert not torch.equal(fusion.get_buffer("bucket_a"), fusion.get_buffer("bucket_b"))


def test_hpfn_is_a_full_contraction_of_its_order_and_of_order_one_linear() -> None:
    fusion, x = made("hpfn", order=3, rank=2), features(full(3))
    f = torch.cat([torch.ones(3, 1).double(), *pooled(x)], dim=1)
    a = fusion.factors
    tensor = torch.einsum("rio,rjo,rko->ijko", a[0], a[1], a[2])
    close(fusion(x).embedding, torch.einsum("bi,bj,bk,ijko->bo", f, f, f, tensor))
    linear = made("hpfn", order=1, rank=2)
    close(linear(x).embedding, f @ linear.factors[0].sum(0))


def test_hpfn_with_one_block_per_factor_is_lmf() -> None:
    lmf, hpfn = made("lmf", rank=2), made("hpfn", order=3, rank=2)
    x = features(patterns(3)[:-1])
    with torch.no_grad():
        hpfn.factors.zero_()
        start = 1
        for q, (m, width) in enumerate(WIDTHS.items()):
            hpfn.factors[q, :, 0] = lmf.factors[m][:, 0]
            hpfn.factors[q, :, start : start + width] = lmf.factors[m][:, 1:]
            start += width
        hpfn.factors[0] *= lmf.rank_weights[:, None, None]
        lmf.bias.zero_()
    close(hpfn(x).embedding, lmf(x).embedding)


def test_mmtm_gates_the_mean_of_tokens_which_zero_excitation_leaves() -> None:
    fusion, x = made("mmtm"), features(full(3))
    with torch.no_grad():
        for excite in fusion.excite.values():
            excite.weight.zero_()
            excite.bias.zero_()
    means = []
    for m in WIDTHS:
        rows = torch.stack([x[m].tokens[b][x[m].mask[b]].mean(0) for b in range(3)])
        means.append(fusion.project[m](rows))
    close(fusion(x).embedding, torch.stack(means).mean(0))
    fusion, x = made("mmtm"), features(full(1))
    squeezed = torch.cat([x[m].tokens[0][x[m].mask[0]].mean(0) for m in WIDTHS])
    z = torch.relu(fusion.squeeze(squeezed))
    out = []
    for m in WIDTHS:
        gate = 2 * fusion.excite[m](z).sigmoid()
        assert ((gate > 0) & (gate < 2)).all()
        out.append(fusion.project[m]((x[m].tokens[0][x[m].mask[0]] * gate).mean(0)))
    close(fusion(x).embedding[0], torch.stack(out).mean(0))


def test_embracenet_draws_whole_dimensions_of_what_is_present_and_expects_their_mean() -> None:
    fusion = made("embracenet")
    x = features(torch.tensor([[True, False, True]]).expand(400, 3))
    one = {m: Features(*(t[:1].expand_as(t) for t in f)) for m, f in x.items()}
    docked = torch.stack([a.relu() for a in aligned(fusion, one).values()])[:, 0]
    close(fusion(one).embedding[0], (docked[0] + docked[2]) / 2)
    torch.manual_seed(0)
    drawn = fusion.train()(one).embedding
    from_image, from_audio = drawn == docked[0], drawn == docked[2]
    assert (from_image | from_audio).all()
    error = (docked[0] - docked[2]).abs() / 2 / math.sqrt(400)
    assert ((drawn.mean(0) - (docked[0] + docked[2]) / 2).abs() <= 4 * error + 1e-12).all()


# ---- mmdynamics


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
