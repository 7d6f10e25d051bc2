"""Models that are fitted once on all features: the rows that a fusion has to beat."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from threadpoolctl import threadpool_info, threadpool_limits

from fusionzoo.benchmark import api, jobs
from fusionzoo.benchmark.bench import Bench, Job, open_bench
from fusionzoo.benchmark.candidates import (
    KERNELS,
    LOGISTIC,
    TABULAR,
    TREES,
    select_baselines,
    settings_of,
)
from fusionzoo.benchmark.feeds import ProbeFeed
from fusionzoo.benchmark.prepare import prepare
from fusionzoo.errors import FusionZooError
from fusionzoo.training.fitted.components import COMPONENTS, Tabular, Trees, principal_components
from fusionzoo.training.fitted.kernels import KernelSum
from fusionzoo.training.fitted.linear import best_penalty
from fusionzoo.training.fitted.method import Inputs
from helpers.setup_benchmark import small, vectors

ROWS = 90


def prepared(tmp_path: Path, **changes: object) -> Bench:
    bench, dataset = open_bench(small(tmp_path, controls=False, corruptions=False, **changes))
    return prepare(bench, dataset, tokens=False)


def inputs(rows: int, seed: int, widths: tuple[int, ...] = (3, 5)) -> Inputs:
    """Random vectors, of which every fourth sample lacks the second modality."""
    draw = np.random.default_rng(seed)
    present = np.ones((rows, len(widths)), np.bool_)
    present[::4, 1] = False
    parts = [draw.standard_normal((rows, width)) for width in widths]
    return Inputs(tuple(x * present[:, [n]] for n, x in enumerate(parts)), present)


def rings(x: Inputs) -> NDArray[np.int64]:
    """Three classes by the distance from the origin: no linear model tells them apart."""
    return np.digitize((x.parts[0] ** 2).sum(1), (1.5, 3.5))


def test_a_linear_probe_of_a_modality_is_scikit_learns_on_the_samples_that_have_it(
    tmp_path: Path,
) -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    values: dict[str, list[list[float] | None]] = {
        name: (torch.randn(120, 4, generator=draw) + labels[:, None]).tolist() for name in "ab"
    }
    for row in range(0, 120, 5):
        values["a"][row] = None
    data = vectors(tmp_path / "data.jsonl", [f"c{x}" for x in labels.tolist()], values)
    bench = prepared(tmp_path, data=data, folds=3, seeds=2, refit=False)
    probe = Job("linear probe of a", 0, (0, 1), False, {}, {})
    first, second = jobs.run_job(bench, probe)
    assert np.array_equal(first.logits, second.logits)  # no seed
    fold = bench.folds[0]
    (train, test) = ProbeFeed(bench, probe)([fold.train, fold.test], -1)
    assert list(train) == ["a"]  # no other modality
    there, tested = (x["a"].mask.any(1).numpy() for x in (train, test))
    x, y = train["a"].pooled.numpy()[there], bench.targets[fold.train].numpy()[there]
    model = LogisticRegression(C=first.facts["penalty"], max_iter=500, tol=1e-3)
    expected = model.fit(x.astype(float), y).predict_log_proba(test["a"].pooled.double().numpy())
    np.testing.assert_allclose(first.logits[tested], expected[tested], atol=1e-3)
    shares = torch.bincount(bench.targets[fold.train]) / len(fold.train)
    absent = first.logits[~tested]
    np.testing.assert_allclose(absent, shares.log().expand(len(absent), -1), atol=1e-6)


@pytest.mark.parametrize("best", [1e-3, 0.1, 10.0, 1e4, 1e9])
def test_a_penalty_at_the_end_of_the_grid_is_searched_beyond_it(best: float) -> None:
    tried: list[float] = []

    def fit_penalty(penalty: float) -> tuple[float, str]:
        tried.append(penalty)
        return abs(math.log10(penalty / best)), f"{penalty:g}"

    penalty, (_, name) = best_penalty(fit_penalty)
    assert penalty == pytest.approx(min(best, 1e6)) and name == f"{penalty:g}"
    assert len(tried) == len(set(tried)) <= 9


def test_boosted_trees_are_scikit_learns_with_missing_modalities_as_missing_values() -> None:
    learned, asked = inputs(ROWS, 0), inputs(20, 1)
    labels = rings(learned)
    classes, shares = Trees().shares(learned, labels, asked, {"rate": 0.2, "leaves": 8})
    x, others = (
        np.where(np.repeat(part.present, (3, 5), 1), part.side_by_side, np.nan)
        for part in (learned, asked)
    )
    model = HistGradientBoostingClassifier(
        learning_rate=0.2, max_leaf_nodes=8, early_stopping=False, random_state=0
    )
    expected = model.fit(x, labels).predict_proba(others)
    np.testing.assert_array_equal(classes, [0, 1, 2])
    np.testing.assert_array_equal(shares, expected)


@pytest.mark.parametrize(
    ("candidate", "model"),
    [(TREES, HistGradientBoostingClassifier), (LOGISTIC, LogisticRegression)],
)
def test_fitted_models_take_no_more_threads_than_torch(
    candidate: str, model: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes have a thread each: models that took all cores slowed each other down."""
    seen: list[int] = []
    fit = model.fit

    def recorded(self: Any, *arguments: Any, **weights: Any) -> Any:
        seen.extend(x["num_threads"] for x in threadpool_info())
        return fit(self, *arguments, **weights)

    bench = prepared(tmp_path)
    monkeypatch.setattr(model, "fit", recorded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with threadpool_limits(2):
        jobs.run_job(bench, Job(candidate, 0, (0,), False, {}, {}))
    assert seen and set(seen) == {1}


def test_the_kernel_sum_is_an_svm_on_the_mean_of_kernels_that_absent_modalities_leave_out() -> None:
    learned, asked = inputs(ROWS, 0), inputs(40, 1)
    labels = rings(learned) + 4  # classes need not start at 0
    _, shares = KernelSum().shares(learned, labels, asked, {"gamma": 1.0, "penalty": 10.0})
    scales = [2 * learned.parts[n][learned.present[:, n]].var(0).sum() for n in range(2)]

    def kernel(a: int, b: int, first: Inputs) -> float:
        both = [n for n in range(2) if first.present[a, n] and learned.present[b, n]]
        squares = [((first.parts[n][a] - learned.parts[n][b]) ** 2).sum() for n in both]
        return sum(math.exp(-x / scales[n]) for n, x in zip(both, squares, strict=True)) / 2

    gram, others = (
        np.array([[kernel(a, b, x) for b in range(ROWS)] for a in range(len(x.present))])
        for x in (learned, asked)
    )
    ranks = SVC(kernel="precomputed", C=10.0).fit(gram, labels).decision_function(others)
    np.testing.assert_array_equal(shares.argsort(1), ranks.argsort(1))
    logs = np.log(shares)  # the margins times one scale, up to a constant of each sample
    slopes = np.ptp(logs, axis=1) / np.ptp(ranks, axis=1)
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-6)


def test_the_margins_of_a_kernel_sum_become_probabilities_that_can_be_trusted() -> None:
    learned, asked = inputs(300, 0), inputs(300, 1)
    draw = np.random.default_rng(2)
    noisy = {
        name: np.where(draw.random(300) < 0.3, draw.integers(0, 3, 300), rings(x))
        for name, x in (("learned", learned), ("asked", asked))
    }
    setting = {"gamma": 1.0, "penalty": 1.0}
    _, shares = KernelSum().shares(learned, noisy["learned"], asked, setting)
    hits = shares.argmax(1) == noisy["asked"]
    assert hits.mean() > 0.5
    assert shares.max(1).mean() == pytest.approx(hits.mean(), abs=0.08)


def test_a_class_that_a_part_of_the_training_samples_lacks_breaks_no_calibration() -> None:
    learned, asked = inputs(12, 0), inputs(5, 1)
    labels = np.array([0] * 6 + [1] * 5 + [2])
    classes, shares = KernelSum().shares(learned, labels, asked, {"gamma": 1.0, "penalty": 1.0})
    assert classes.tolist() == [0, 1, 2] and shares.shape == (5, 3)
    np.testing.assert_allclose(shares.sum(1), 1.0)
    _, shares = KernelSum().shares(  # too few to hold any out
        inputs(4, 0), np.array([0, 1, 0, 1]), asked, {"gamma": 1.0, "penalty": 1.0}
    )
    np.testing.assert_allclose(shares.sum(1), 1.0)


def test_principal_components_are_of_the_samples_that_are_learnt_from() -> None:
    learned, asked = inputs(ROWS, 0, (200, 2)), inputs(10, 1, (200, 2))
    x, others = principal_components(learned, asked)
    share = COMPONENTS // 2
    assert x.shape == (ROWS, share + 2) and others.shape == (10, share + 2)
    np.testing.assert_allclose(x[:, :share].mean(0), 0, atol=1e-9)
    deviations = x[:, :share].std(0)
    assert (np.diff(deviations) <= 1e-9).all()  # the widest first
    np.testing.assert_array_equal(np.isnan(x[:, share:]).all(1), ~learned.present[:, 1])
    again, _ = principal_components(learned, inputs(10, 5, (200, 2)))
    np.testing.assert_array_equal(x, again)


def test_trees_and_kernels_see_what_no_linear_model_does(tmp_path: Path) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 300, 2))
    labels = ["far" if x > 3.5 else "near" for x in (a**2).sum(1) + (b**2).sum(1)]
    data = vectors(tmp_path / "d.jsonl", labels, {"a": a.tolist(), "b": b.tolist()})
    bench = prepared(tmp_path, data=data, folds=3)
    hits = {
        name: jobs.run_job(bench, Job(name, 0, (0,), False, {}, {}))[0].scores.mean()
        for name in (LOGISTIC, TREES, KERNELS)
    }
    assert hits[LOGISTIC] < 0.6 and min(hits[TREES], hits[KERNELS]) > 0.7


@pytest.mark.parametrize("refit", [False, True])
def test_no_candidate_sees_the_test_samples_not_even_in_a_refit(
    refit: bool, tmp_path: Path
) -> None:
    """Other labels of a fold's test samples change no bit of what is answered to them."""
    bench = prepared(tmp_path, folds=3, seeds=1, refit=refit, epochs=2)
    fold = bench.folds[0]
    planted = bench.targets.clone()
    planted[fold.test] = planted[fold.test].flip(0) ^ 1
    assert not planted.equal(bench.targets)
    for name in ("sum", "alone:a", "linear probe of a", LOGISTIC, TREES, KERNELS):
        job = Job(name, 0, (0,), False, settings_of(bench.cfg, name), {})
        first, second = (jobs.run_job(x, job)[0] for x in (bench, replace(bench, targets=planted)))
        np.testing.assert_array_equal(first.logits, second.logits)
        assert not np.array_equal(first.scores, second.scores)  # which the labels do change
    relearnt = bench.targets.clone()
    relearnt[fold.val] = relearnt[fold.val] ^ 1
    job = Job(LOGISTIC, 0, (0,), False, {}, {})
    changed = jobs.run_job(replace(bench, targets=relearnt), job)[0].logits
    assert refit <= (not np.array_equal(changed, jobs.run_job(bench, job)[0].logits))


@pytest.mark.needs("tabicl", extra="tfm")
def test_what_cannot_be_run_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(KernelSum, "most_rows", 100)
    changes = {"fusions": "sum", "seeds": 1, "epochs": 1, "folds": 3}
    changes |= {"baselines": "alone,kernels,tabular,linear"}
    report = api.run(small(tmp_path, controls=False, corruptions=False, **changes))
    reasons = report.figures["not_run"]
    assert reasons.keys() == {KERNELS, TABULAR}
    assert re.fullmatch(r"it would learn from 2\d\d samples.*at most 100", reasons[KERNELS])
    assert reasons[TABULAR].startswith("weights of TabICL not found (tabicl-classifier-v2-")
    assert "hf download jingang/TabICL tabicl-classifier-v2-" in reasons[TABULAR]
    assert f"{TABULAR} was not run: weights of TabICL" in (tmp_path / "index.html").read_text()
    lines = [line["candidate"] for line in report.figures["leaderboard"]]
    assert LOGISTIC in lines and TABULAR not in lines and not report.failed


@pytest.mark.needs("tabicl", extra="tfm")
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_tabicl_answers_with_the_weights_of_the_hubs_cache(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small network of random weights stands in for the published ones."""
    weights = small_tabicl(tmp_path / "tiny.ckpt", kind)
    asked: list[str] = []

    def find(repository: str, name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        asked.append(f"{repository}/{name}")
        return str(weights)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", find)
    learned, others = inputs(40, 0), inputs(10, 1)
    method = Tabular(torch.device("cpu"))
    setting, _ = method.choose(lambda setting: (0.0, setting))
    if kind == "classification":
        classes, shares = method.shares(learned, rings(learned), others, setting)
        assert classes.tolist() == [0, 1, 2]
        np.testing.assert_allclose(shares.sum(1), 1.0, atol=1e-5)
        _, again = method.shares(learned, rings(learned), others, setting)
        np.testing.assert_array_equal(shares, again)
        assert np.ptp(shares, axis=0).max() > 0  # it reads the samples
    else:
        y = learned.parts[0][:, :2] * 10 + 100
        numbers = method.numbers(learned, y, others, setting)
        assert numbers.shape == (10, 2) and np.isfinite(numbers).all()
    kind_name = {"classification": "classifier", "regression": "regressor"}[kind]
    assert asked[0].startswith(f"jingang/TabICL/tabicl-{kind_name}-v2-")


def small_tabicl(path: Path, kind: str) -> Path:
    network = importlib.import_module("tabicl._model.tabicl").TabICL
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "max_classes": 10 if kind == "classification" else 0,
        **{"embed_dim": 16, "col_num_blocks": 1, "col_nhead": 2, "col_num_inds": 8},
        **{"row_num_blocks": 1, "row_nhead": 2, "row_num_cls": 2},
        **{"icl_num_blocks": 1, "icl_nhead": 2, "zero_init": False, "num_quantiles": 9},
    }
    torch.save({"config": config, "state_dict": network(**config).state_dict()}, path)
    return path


def test_baselines_are_chosen_by_name(tmp_path: Path) -> None:
    bench, _ = open_bench(small(tmp_path))
    for words, names in (
        ("all", (LOGISTIC, TREES, KERNELS, TABULAR)),
        ("trees, linear", (LOGISTIC, TREES)),
        ("none", ()),
    ):
        assert select_baselines(replace(bench.cfg, baselines=words), bench) == [*names]
    with pytest.raises(FusionZooError, match=r"--baselines: unknown 'tres'.*trees"):
        select_baselines(replace(bench.cfg, baselines="linear,tres"), bench)
