"""An absent modality is replaced by its training mean, which depends on nothing that is absent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusionzoo.fusion import list_fusions
from fusionzoo.fusion.base import RunningMeans
from fusionzoo.structures import Features
from fusionzoo.testing.fusions import features, full, patterns, poison
from helpers import ranks
from helpers.oracle import WIDTHS, close, made


def follows_features(module: nn.Module) -> bool:
    """Whether a module keeps the means of the features themselves, not of what is made of them."""
    if type(module) is not RunningMeans:
        return False
    return all(module.mean(m).shape == (width,) for m, width in WIDTHS.items())


FOLLOWING = [n for n in list_fusions() if any(follows_features(m) for m in made(n).modules())]
PRODUCTS = ["block", "mcb", "mfb", "mfh", "mlb", "mutan"]
DIMS = {"a": 3, "b": 2}


def batches() -> list[tuple[dict[str, Tensor], Tensor]]:
    """Three batches of six rows, a third of the values absent, which hold NaN."""
    draw = torch.Generator().manual_seed(0)
    made_batches = []
    for _ in range(3):
        present = torch.rand(6, 2, generator=draw) > 0.3
        pooled = {m: torch.randn(6, w, generator=draw).double() for m, w in DIMS.items()}
        made_batches.append((pooled, present))
    return made_batches


def zeroed(pooled: dict[str, Tensor], present: Tensor) -> dict[str, Tensor]:
    return {
        m: x.masked_fill(~here[:, None], 0)
        for (m, x), here in zip(pooled.items(), present.unbind(1), strict=True)
    }


def test_the_mean_is_that_of_the_rows_that_have_the_modality_older_batches_counting_less() -> None:
    means = RunningMeans(DIMS).double()
    for pooled, present in batches():
        means(zeroed(pooled, present), present)
    for column, m in enumerate(DIMS):
        total, weight = torch.zeros(DIMS[m]).double(), 0.0
        for age, (pooled, present) in enumerate(reversed(batches())):
            here = present[:, column]
            total += 0.99**age * pooled[m][here].sum(0)
            weight += 0.99**age * here.sum().item()
        close(means.mean(m), total / weight)


def test_absent_rows_get_the_mean_which_is_zero_before_any_batch_has_the_modality() -> None:
    means = RunningMeans(DIMS).double()
    pooled, present = batches()[0]
    means(zeroed(pooled, present), present)
    before = {m: means.mean(m).clone() for m in DIMS}
    other, absent = batches()[1]
    filled = means.eval()(zeroed(other, absent), absent)
    for column, (m, mean) in enumerate(before.items()):
        assert torch.equal(means.mean(m), mean)
        here = absent[:, column]
        assert torch.equal(filled[m][here], other[m][here])
        assert torch.equal(filled[m][~here], mean.expand(int((~here).sum()), -1))
    means = RunningMeans(DIMS).double()
    nothing = torch.zeros(4, 2, dtype=torch.bool)
    zeros = {m: torch.zeros(4, w).double() for m, w in DIMS.items()}
    filled = means(zeros, nothing)
    assert all((x == 0).all() for x in filled.values())
    assert all((means.mean(m) == 0).all() for m in DIMS)


@pytest.mark.parametrize("name", FOLLOWING)
def test_in_training_too_what_is_absent_is_never_read(name: str) -> None:
    given = features(patterns(3))
    states = []
    for value in (0.0, float("nan"), 1e30):
        fusion = made(name).train()
        fusion(poison(given, value))
        states.append(fusion.state_dict())
    for key, x in states[0].items():
        assert torch.equal(x, states[1][key])
        assert torch.equal(x, states[2][key])


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_dropped_modality_answers_as_its_training_mean_would(name: str) -> None:
    fusion, given = made(name), features(full(6))
    fusion.train()(given)
    mean = given["text"].pooled.mean(0).expand(6, -1)
    averaged = {**given, "text": given["text"]._replace(pooled=mean)}
    mask = torch.zeros_like(given["text"].mask)
    dropped = {**given, "text": given["text"]._replace(mask=mask)}
    fusion.eval()
    close(fusion(dropped).logits, fusion(averaged).logits)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_factor_of_an_absent_modality_is_not_one(name: str) -> None:
    """Untrained, it is the factor of the vector 0: what is left of the product is its bias."""
    fusion, given = made(name), features(full(3))
    text = given["text"]
    zero = Features(text.tokens, text.mask, torch.zeros_like(text.pooled))
    dropped = text._replace(mask=torch.zeros_like(text.mask))
    close(fusion({**given, "text": dropped}).logits, fusion({**given, "text": zero}).logits)


@pytest.mark.parametrize("name", ["mfb", "tfn"])
def test_it_compiles_whole_in_training(name: str) -> None:
    given = features(patterns(3), dtype=torch.float32)
    settings = {"dropout": 0.0}
    plain, compiled = (made(name, **settings).float().train() for _ in range(2))
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        close(step(given).logits, plain(given).logits, tolerance=1e-5)
    for m in plain.dims:
        close(compiled.means.mean(m), plain.means.mean(m), tolerance=1e-6)
        assert (plain.means.mean(m) != 0).any()


def follow_in_process(rank: int, folder: str) -> None:
    """Follow every other row, as one of two processes."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    means = RunningMeans(DIMS).double()
    for pooled, present in batches():
        mine = slice(rank, 4 if rank else None, 2)  # 3 rows, and 2
        means({m: x[mine] for m, x in zeroed(pooled, present).items()}, present[mine])
    torch.save(means.state_dict(), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_mean_of_all_rows(tmp_path: Path) -> None:
    ranks.run(__file__, 2, tmp_path, timeout=120)
    alone = RunningMeans(DIMS).double()
    for pooled, present in batches():
        rows = [0, 1, 2, 3, 4]
        alone({m: x[rows] for m, x in zeroed(pooled, present).items()}, present[rows])
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for key, value in alone.state_dict().items():
            close(state[key], value)


if __name__ == "__main__":
    follow_in_process(int(sys.argv[1]), sys.argv[2])
