"""`zorro` and `mca`: which token reads which, and the models that they contain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.structures import Features, keep_only
from fusionzoo.testing.fusions import DIMS, features, full, patterns
from helpers.oracle import WIDTHS, close, context, copy, made

Inputs = dict[str, Features]
SUBSETS = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def reading_grads(fusion: Fusion, output: int) -> list[bool]:
    """Return whether a pooled vector depends on each modality's tokens."""
    x = features(full(2))
    leaves = {m: f._replace(tokens=f.tokens.requires_grad_()) for m, f in x.items()}
    fusion.pooled_streams(leaves)[:, output].square().sum().backward()
    return [bool((f.tokens.grad != 0).any()) for f in leaves.values()]


@pytest.mark.parametrize("num_layers", [1, 3])
def test_each_stream_and_channel_reads_its_own_modalities_and_fusion_tokens_all(
    num_layers: int,
) -> None:
    for name, subsets in (("zorro", [(0, 1, 2)]), ("mca", SUBSETS)):
        fusion = made(name, num_layers=num_layers)
        for number, subset in enumerate([(0,), (1,), (2,), *subsets]):
            assert reading_grads(fusion, number) == [n in subset for n in range(3)], subset


def test_a_modalitys_own_answer_is_the_same_whatever_else_is_there() -> None:
    fusion, x = made("zorro"), features(full(3))
    together = fusion(x).unimodal
    for name in WIDTHS:
        close(fusion(keep_only(x, name)).unimodal[name], together[name])


def test_a_channel_is_a_zorro_of_its_modalities() -> None:
    mca, x = made("mca"), features(full(3))
    for number, subset in enumerate(SUBSETS):
        names = [list(WIDTHS)[column] for column in subset]
        zorro = made("zorro", {m: WIDTHS[m] for m in names}, num_fusion_tokens=4)
        state = {k: v for k, v in mca.state_dict().items() if k in zorro.state_dict()}
        for key in ("fusion_tokens", "channel_queries"):
            state[key] = mca.state_dict()[key][number : number + 1]
        zorro.load_state_dict(state)
        answer = zorro(x)
        close(mca.head(mca.pooled_streams(x)[:, 3 + number]), answer.logits)
        close(mca(keep_only(x, *names)).logits, answer.logits)
        close(mca(keep_only(x, *names)).embedding, answer.embedding)


def test_zorro_without_its_mask_is_the_single_stream_transformer() -> None:
    zorro = made("zorro", num_fusion_tokens=1)
    plain, x = copy(zorro, made("concat_transformer"), strict=False), features(full(3))
    with torch.no_grad():
        plain.cls.copy_(zorro.fusion_tokens[0, 0])
    tokens, masks = zorro.embedded(x)
    joined = torch.cat([*tokens.values(), zorro.fusion_tokens[0].expand(3, -1, -1)], dim=1)
    mask = F.pad(torch.cat([*masks.values()], dim=1), (0, 1), value=True)
    fused = zorro.norm(zorro.transform(joined, mask[:, None]))[:, -1]
    close(fused, plain(x).embedding)


def test_a_modalitys_stream_is_a_transformer_with_the_shared_blocks() -> None:
    zorro, x = made("zorro"), features(full(1))
    tokens, masks = zorro.embedded(x)
    for column, name in enumerate(WIDTHS):
        y, mask = tokens[name], masks[name]
        for block in zorro.blocks:
            y = block(y, mask)
        query = zorro.queries[name].expand(1, 1, -1)
        wanted = query + zorro.pool(query, zorro.norm(y), mask)
        close(zorro.pooled_streams(x)[:, column], wanted[:, 0])


def test_the_channel_of_what_is_present_answers_or_the_first_largest() -> None:
    mca = made("mca")
    x = features(patterns(3))
    output, logits = mca(x), mca.head(mca.pooled_streams(x))
    order = {(0,): 0, (1,): 1, (2,): 2} | {s: 3 + n for n, s in enumerate(SUBSETS)}
    for row, bits in enumerate(patterns(3)[:-1].tolist()):
        stream = order[tuple(n for n, bit in enumerate(bits) if bit)]
        close(output.logits[row], logits[row, stream])
    close(output.embedding[-1], mca.null)
    mca = made("mca", sizes=[2])
    logits, streams = mca(x).logits, mca.head(mca.pooled_streams(x))
    close(logits[0], streams[0, 3])  # complete: the first pair
    close(logits[3], streams[3, 0])  # only the first modality
    mca = made("mca", sizes=[3])
    close(mca(x).logits[1], mca.head(mca.pooled_streams(x))[1, 0])  # of a pair its first


def test_a_channel_learns_only_from_rows_that_have_all_of_it() -> None:
    mca, target = made("mca"), torch.tensor([1])
    losses = context(1).criterion

    def loss(*names: str) -> tuple[Tensor, Tensor]:
        x = keep_only(features(full(1)), *names)
        return mca.loss(mca(x), target, context(1)), mca.head(mca.pooled_streams(x))[0]

    found, streams = loss("image", "audio")
    wanted = [losses(streams[n : n + 1], target) for n in (0, 2, 4)]  # two alone, and their pair
    close(found, torch.stack(wanted).mean(0))
    found, streams = loss(*WIDTHS)
    close(found, torch.stack([losses(streams[n : n + 1], target) for n in range(7)]).mean(0))
    nothing, _ = loss()
    close(nothing, losses(mca.head(mca.null)[None], target))


def test_zorros_own_loss_averages_over_present_modalities() -> None:
    fusion, target = made("zorro"), torch.tensor([2])
    output = fusion(keep_only(features(full(1)), "text", "audio"))
    criterion = context(1).criterion
    own = [criterion(output.unimodal[m], target) for m in ("text", "audio")]
    wanted = criterion(output.logits, target) + torch.stack(own).mean(0)
    close(fusion.loss(output, target, context(1)), wanted)


def test_more_channels_than_it_can_have_are_refused() -> None:
    six = {**DIMS, "lidar": 3}
    assert made("mca", six, sizes=[6], num_layers=1).channels == [(0, 1, 2, 3, 4, 5)]
    with pytest.raises(FusionZooError, match="57 subsets, too many for a channel each; name the"):
        create_fusion("mca", six, 8, 4)
