"""Prefixes of vectors: their loss in training, and the record in the model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusionzoo as fz
from fusionzoo.config import RunConfig, from_settings
from fusionzoo.training.balance.matryoshka import halves, prefix_sizes, with_matryoshka
from helpers.strategies import close, make_batch, make_objective, mean, only, see


def test_the_loss_is_that_of_a_linear_head_on_each_prefix() -> None:
    objective = make_objective("matryoshka", {"sizes": [5, 2], "weight": 0.5})
    strategy, batch = only(objective), make_batch()
    context = see(objective, batch)
    terms = strategy.extra_losses(context)
    assert list(terms) == ["matryoshka/2", "matryoshka/5"]
    for size in (2, 5):
        head: Any = strategy.heads[str(size)]  # type: ignore[index]
        logits = context.output.embedding[:, :size] @ head.weight.T + head.bias
        close(mean(terms[f"matryoshka/{size}"]), 0.5 * F.cross_entropy(logits, batch.target))
    gradient = torch.autograd.grad(terms["matryoshka/2"].values.sum(), context.output.embedding)[0]
    assert gradient[:, :2].abs().min() > 0
    assert not gradient[:, 2:].any()  # entries beyond the prefix learn nothing from it


def test_aligned_prefixes_are_cut_and_scaled_to_unit_length() -> None:
    objective = make_objective("contrastive_align", {"dim": 4, "prefixes": [2]})
    strategy: Any = only(objective)
    context = see(objective, make_batch())
    terms = strategy.extra_losses(context)
    vectors = strategy.embed(context.features)
    both = vectors["image"].any(1) & vectors["text"].any(1)
    left, right = (F.normalize(vectors[name][both][:, :2], dim=1) for name in ("image", "text"))
    close(terms["contrastive_align/image-text/2"].values, strategy.loss(left, right))
    assert sum(name.endswith("/2") for name in terms) == len(strategy.pairs) == 3


FUSED, ALIGNED = {"matryoshka": {"sizes": [2, 4]}}, {"contrastive_align": {"prefixes": [2, 4]}}


@pytest.mark.parametrize(
    ("balance", "has_target", "expected"),
    [
        ("", True, FUSED),
        ("contrastive_align", False, ALIGNED),
        (["contrastive_align", "ogm_ge"], True, {**FUSED, **ALIGNED}),
    ],
)
def test_the_flag_sets_up_the_strategies(
    balance: Any, has_target: bool, expected: dict[str, Any]
) -> None:
    cfg = from_settings(RunConfig, {"matryoshka": "4,2", "balance": balance})
    names, settings = with_matryoshka(cfg, has_target)
    assert settings == expected
    assert {*settings} <= {*names}


def test_wrong_sizes_are_one_line() -> None:
    with pytest.raises(fz.FusionZooError, match="sizes: 9, and the fused vector has 8 entries"):
        make_objective("matryoshka", {"sizes": [9]})
    with pytest.raises(fz.FusionZooError, match=r"--matryoshka 'a,2': expected sizes such as"):
        prefix_sizes("a,2")
    with pytest.raises(fz.FusionZooError, match="prefixes: 5, and dim=4"):
        make_objective("contrastive_align", {"dim": 4, "prefixes": [5]})
    assert halves(256) == [8, 16, 32, 64, 128]


def test_a_run_records_what_it_trained_and_embedding_warns_of_other_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"name": "interactions", "samples": 90}
    run = fz.train(data, matryoshka="4,8", epochs=1, out=tmp_path / "run", log="none")
    model = fz.load(run.folder)
    assert model.spec["matryoshka"] == [4, 8]
    capsys.readouterr()
    for sizes, warned in (("4,8", False), ("4,6", True)):
        fz.embed(model, data, matryoshka=sizes, out=tmp_path / "e.parquet")
        text = "warning: the model was not trained with --matryoshka 6"
        assert (text in capsys.readouterr().out) is warned
    assert fz.read_embeddings(tmp_path / "e.parquet", "fused_6").vectors.shape == (90, 6)
