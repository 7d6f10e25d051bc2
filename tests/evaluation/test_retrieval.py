"""Retrieval figures, against closed cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score

import fusionzoo as fz
from fusionzoo import create_dataset
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation import retrieval
from fusionzoo.evaluation.retrieval import (
    RelevanceLabels,
    codes,
    direction_scores,
    intervals,
    match,
    ranked,
    retrieval_figures,
    retrieval_intervals,
)
from fusionzoo.scripts.train import main as train


def embedded(count: int, dim: int = 8) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(count))


def ranks(one: torch.Tensor, two: torch.Tensor) -> list[float]:
    """Return the rank of each row's partner among the rows of `two`."""
    every = [np.arange(len(one))]
    return ranked(one, two, match(every, every)).values["rank"].tolist()


def test_ranks_are_counted_by_hand_and_ties_and_nan_count_against_the_partner() -> None:
    one = torch.tensor([[1.0, 0], [0, 1], [1, 1]])
    two = torch.tensor([[0.0, 1], [0, 1], [1, 1]])
    assert ranks(one, two) == [3, 2, 1]  # 0: both others are nearer or as near; 1: a tie with 0
    assert ranks(two, one) == [3, 1, 1]
    same = torch.ones(5, 3)
    assert ranks(same, same) == [5] * 5
    assert ranks(same, torch.full((5, 3), torch.nan)) == [5] * 5


def test_only_samples_that_have_both_take_part_and_none_is_an_error() -> None:
    x = embedded(20)
    present = torch.ones(20, 3, dtype=torch.bool)
    present[10:, 1] = False
    noise = x.clone()
    noise[10:] = torch.nan  # what is absent may be anything
    found = retrieval_figures({"a": x, "b": noise, "c": x}, present)
    assert found["recall@1"] == 1
    assert {name.partition(".")[0] for name in found if "_to_" in name} == {
        f"{m}_to_{n}" for m in "abc" for n in "abc" if m != n
    }
    present = torch.eye(2, dtype=torch.bool)
    with pytest.raises(FusionZooError, match="no sample has two modalities"):
        retrieval_figures({"a": embedded(2), "b": embedded(2)}, present)


def brute(queries: torch.Tensor, gallery: torch.Tensor, right: torch.Tensor) -> list[list[float]]:
    """AP, nDCG@10, first rank and its reciprocal by scikit-learn: right (Q, A) bool."""
    cosines = torch.nn.functional.cosine_similarity(queries[:, None], gallery[None], dim=-1)
    rows = []
    for scores, relevant in zip(cosines.numpy(), right.numpy(), strict=True):
        first = 1 + int((scores > scores[relevant].max()).sum())
        ap = float(average_precision_score(relevant, scores))
        ndcg = float(ndcg_score([relevant.astype(float)], [scores], k=10))
        rows.append([ap, ndcg, float(first), 1 / first])
    return rows


@pytest.mark.parametrize("classes", [10, 2])  # few relevant items are counted, many are sorted
@pytest.mark.parametrize("cells", [2**24, 700])
def test_figures_equal_scikit_learns(
    classes: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "CELLS", cells)
    monkeypatch.setattr(retrieval, "TIE", 0.0)
    count = 120
    queries, gallery = embedded(count), embedded(count) + 2 * embedded(count + 1)[:count]
    labels = np.arange(count) % classes
    matching = match([np.arange(count)], [np.arange(count)], labels)
    scores = ranked(queries, gallery, matching).values
    right = torch.from_numpy(labels[:, None] == labels)
    expected = np.array(brute(queries, gallery, right))
    for column, name in enumerate(("map", "ndcg@10", "rank", "mrr")):
        np.testing.assert_allclose(scores[name], expected[:, column], rtol=1e-6)
    assert scores["recall@5"].mean() == (expected[:, 2] <= 5).mean()


def test_copies_are_one_query_and_one_answer_and_every_partner_is_right() -> None:
    pictures = torch.eye(4)[[0, 0, 1, 2]]  # the first two rows show the same image
    texts = torch.eye(4)[[0, 3, 1, 2]]  # and have two texts, one of them far away
    present = torch.ones(4, 2, dtype=torch.bool)
    plain = retrieval_figures({"image": pictures, "text": texts}, present)
    assert plain["image_to_text.recall@1"] == 0.75
    content = {"image": torch.tensor([0, 0, 1, 2]), "text": torch.arange(4)}
    found = retrieval_figures({"image": pictures, "text": texts}, present, content=content)
    assert found["image_to_text.recall@1"] == 1  # three images, each with a relevant text first
    assert found["image_to_text.map"] == pytest.approx((2 + (1 + 2 / 4) / 2) / 3)
    assert found["text_to_image.recall@1"] == 0.75  # four texts, three images
    assert found["text_to_image.mrr"] == pytest.approx((3 + 1 / 3) / 4)


def test_answers_of_the_same_group_are_right() -> None:
    first, second = torch.eye(4), torch.eye(4)[[1, 0, 3, 2]]  # partners swapped within a group
    present = torch.ones(4, 2, dtype=torch.bool)
    assert retrieval_figures({"a": first, "b": second}, present)["recall@1"] == 0
    groups = torch.tensor([7, 7, 9, 9])
    assert retrieval_figures({"a": first, "b": second}, present, groups=groups)["recall@1"] == 1


def test_a_query_of_all_other_modalities_is_ranked_too() -> None:
    target = embedded(30)
    noise = embedded(31)[:30]
    both = retrieval_intervals(
        {"a": target + noise, "b": target - noise, "c": target}, torch.ones(30, 3, dtype=torch.bool)
    )
    assert both["a+b_to_c"]["mrr"].mean > both["a_to_c"]["mrr"].mean


def test_intervals_cover_the_mean_and_widen_with_groups() -> None:
    x = embedded(60)
    y = x + 1.5 * embedded(61)[:60]
    present = torch.ones(60, 2, dtype=torch.bool)
    copies = {"a": x.repeat_interleave(5, 0), "b": y.repeat_interleave(5, 0)}
    many = present.repeat_interleave(5, 0)
    plain = retrieval_intervals(copies, many)["a_to_b"]["mrr"]
    assert plain.low < plain.mean < plain.high
    clusters = np.arange(60).repeat(5)
    grouped = intervals(direction_scores(copies, many)["a_to_b"], clusters)["mrr"]
    assert grouped.mean == plain.mean
    assert grouped.high - grouped.low > 1.8 * (plain.high - plain.low)  # sqrt(5) in theory


def test_content_is_compared_by_cells_of_the_table_and_numbers_of_vectors() -> None:
    rows = [
        {"id": str(i), "split": "test", "text": t, "vector": [float(i)]}
        for i, t in enumerate("aab")
    ]
    dataset = create_dataset(rows)
    keys = RelevanceLabels(dataset)
    texts = keys.of(["2", "0", "1"]).content["text"].tolist()
    assert texts[1] == texts[2] != texts[0]
    for kind in (pa.list_(pa.float64()), pa.list_(pa.float64(), 2)):
        found = codes(pa.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]], kind)).tolist()
        assert found[0] == found[2] != found[1]
    ragged = codes(pa.array([[1.0], [1.0, 2.0], None, [1.0]])).tolist()
    assert ragged[0] == ragged[3] != ragged[1] and ragged[2] == -1


# ---- in validation


def write_copies(path: Path) -> list[str]:
    """Pairs of vectors; those of `b` are the same in all samples of a split but training's."""
    lines = []
    for row in range(60):
        split = ("train", "val", "test")[row % 3]
        b = [float(row), 2.0] if split == "train" else [1.0, 2.0]
        lines.append({"id": f"s{row}", "split": split, "a": [float(row), 1.0, row % 5], "b": b})
    path.write_text("\n".join(map(json.dumps, lines)))
    data = ["--data.name", "manifest", "--data.root", str(path)]
    for name in "ab":
        data += [f"--data.columns.{name}", name, f"--data.kinds.{name}", "vector"]
    return data


def test_answers_of_equal_content_are_right_in_validation_and_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_copies(tmp_path / "data.jsonl"), tmp_path / "out"
    run = [*data, "--log", "none", "--train.epochs", "1", "--balance", "contrastive_align"]
    assert train([*run, "--objective.name", "none", "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    for split in ("val", "test"):  # 20 samples with one answer, which is right for all of them
        for name in ("a_to_b.recall@1", "a_to_b.map", "b_to_a.recall@1", "b_to_a.ndcg@10"):
            assert metrics[split][name] == pytest.approx(1)
    capsys.readouterr()
    assert main(["evaluate", str(out), *data, "--out", str(tmp_path / "m.json")]) == 0
    assert "Retrieval, with 95 % intervals" in capsys.readouterr().out
    found = json.loads((tmp_path / "m.json").read_text())["retrieval"]
    assert found["a_to_b"]["recall@1"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    settings = {"columns": {"a": "a", "b": "b"}, "kinds": {"a": "vector", "b": "vector"}}
    train_split = {"name": "manifest", "root": str(tmp_path / "data.jsonl"), **settings}
    figures = fz.evaluate(out, train_split, split="train")["retrieval"]["a_to_b"]["mrr"]
    assert figures["low"] < figures["mean"] < figures["high"]
