"""Values removed on purpose: the rate is met, the mechanism is the one that was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fusionzoo import PairedDataset, create_dataset
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError

ROWS = 600
MECHANISMS = ("mcar", "mar", "mnar")


def make(**columns: Any) -> PairedDataset:
    """Texts of different length, vectors of different size, two classes."""
    draw = np.random.default_rng(0)
    table = {
        "id": [f"s{row}" for row in range(ROWS)],
        "split": [("train", "val", "test")[row % 3] for row in range(ROWS)],
        "target": ["ab"[row % 2] for row in range(ROWS)],
        "text": ["x" * int(size) for size in draw.integers(1, 100, ROWS)],
        "vector": (draw.standard_normal((ROWS, 4)) * draw.uniform(0.1, 9, (ROWS, 1))).tolist(),
        **columns,
    }
    kinds = {"text": "text", "vector": "vector"}
    return PairedDataset(pa.table(table), kinds, source="made up")


def lengths(data: PairedDataset) -> np.ndarray:
    return np.array([len(text) for text in data.references("text")], float)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_the_rate_is_met_to_a_single_value_and_no_sample_loses_everything(
    mechanism: Any, rate: float
) -> None:
    data = make().amputate(mechanism, rate=rate, seed=3)
    assert (~data.present).sum(0).tolist() == [round(rate * ROWS)] * 2
    assert data.present.any(1).all()
    assert len(data) == ROWS


def test_values_missing_before_stay_missing_and_do_not_count() -> None:
    texts = [None if row % 4 == 0 else "word" * (row % 9 + 1) for row in range(ROWS)]
    data = make(text=texts)
    for mechanism in MECHANISMS:
        view = data.amputate(mechanism, rate=0.2, modalities="text")
        assert view.present[:, 0].sum() == 450 - 90
        assert view.present[:, 1].all()
        assert not (view.present & ~data.present).any()


def test_the_same_seed_removes_the_same_values_and_another_seed_others() -> None:
    data = make()
    for mechanism in MECHANISMS:
        first, again, other = (
            data.amputate(mechanism, rate=0.3, seed=x).present for x in (1, 1, 2)
        )
        assert torch.equal(first, again)
        assert 0.2 < (first != other).float().mean() < 0.6


def test_mcar_depends_on_nothing_that_can_be_seen() -> None:
    data = make()
    gone = ~data.amputate("mcar", rate=0.3, modalities="text").present[:, 0].numpy()
    # 0.12 is three standard errors of a correlation in 600 samples.
    assert abs(np.corrcoef(gone, lengths(data))[0, 1]) < 0.12
    assert abs(np.corrcoef(gone, np.arange(ROWS) % 2)[0, 1]) < 0.12


def test_mar_follows_the_label_and_within_a_class_nothing_else() -> None:
    data = make()
    gone = ~data.amputate("mar", rate=0.3).present.numpy()
    is_b = np.arange(ROWS) % 2 == 1
    for column in range(2):
        assert gone[is_b, column].mean() > gone[~is_b, column].mean() + 0.15
    for chosen in (is_b, ~is_b):
        assert abs(np.corrcoef(gone[chosen, 0], lengths(data)[chosen])[0, 1]) < 0.18


def test_mar_may_follow_another_modality_which_stays_complete() -> None:
    data = make()
    view = data.amputate("mar", rate=0.3, depends_on="text")
    assert view.present[:, 0].all()
    gone = ~view.present[:, 1].numpy()
    assert np.corrcoef(gone, lengths(data))[0, 1] > 0.3


def test_mnar_follows_the_value_itself() -> None:
    data = make()
    gone = ~data.amputate("mnar", rate=0.3).present.numpy()
    size = np.abs(np.array(data.references("vector"))).mean(1)
    assert np.corrcoef(gone[:, 0], lengths(data))[0, 1] > 0.3
    # Where the text has gone the vector has to stay.
    assert np.corrcoef(gone[~gone[:, 0], 1], size[~gone[:, 0]])[0, 1] > 0.3


def test_pictures_go_by_brightness_and_sounds_by_loudness() -> None:
    draw = np.random.default_rng(0)
    levels = draw.uniform(0, 1, ROWS)
    memory = {
        "image": [np.full((2, 2, 3), int(255 * level), np.uint8) for level in levels],
        "audio": [((1000 * x).astype(np.int16), 8000) for x in np.outer(levels, np.ones(50))],
    }
    rows = list(range(ROWS))
    table = pa.table(
        {"id": list(map(str, rows)), "split": ["train"] * ROWS, "target": ["a"] * ROWS}
        | {name: rows for name in memory}
    )
    data = PairedDataset(table, {name: name for name in memory}, memory=memory)
    for name in memory:
        gone = ~data.amputate("mnar", rate=0.3, modalities=name).present.numpy()
        assert np.corrcoef(gone[:, list(memory).index(name)], levels)[0, 1] > 0.3


def test_a_view_meets_the_rate_in_its_own_samples_and_leaves_the_others_alone() -> None:
    data = make()
    train = data.split("train").amputate("mnar", rate=0.25)
    assert (~train.present).sum(0).tolist() == [50, 50]
    whole = train.subset(range(len(train)))
    whole.rows = torch.arange(ROWS)
    assert (~whole.present).sum(0).tolist() == [50, 50]
    assert data.present.all()


def test_what_was_removed_is_recorded_and_shown() -> None:
    data = make().amputate("mar", rate=0.25, seed=4, modalities=["vector"]).drop(0.1, seed=2)
    lines = [line for line in data_summary(data) if line.startswith("removed")]
    assert lines == [
        "removed   0.25 of vector (mar by label, seed 4)",
        "removed   0.1 of text, vector (mcar, seed 2)",
    ]
    assert not any(line.startswith("removed") for line in data_summary(make()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 1.0}, r"rate=1.0; it must be a number of at least 0 and below 1"),
        ({"rate": 0.6}, r"rate=0.6: of \w+ only 240 values may go"),
        ({"rate": 0.1, "mechanism": "mnra"}, r"mechanism='mnra' is neither"),
        ({"rate": 0.1, "modalities": "txt"}, r"no modality 'txt'. Did you mean 'text'"),
        ({"rate": 0.1, "depends_on": "text"}, r"depends_on='text' is for mechanism='mar' only"),
        ({"rate": 0.1, "mechanism": "mar", "depends_on": "x"}, r"none of label, text, vector"),
        ({"rate": 0.1, "mechanism": "mar", "depends_on": "text", "modalities": "text"}, "itself"),
    ],
)
def test_what_cannot_be_done_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FusionZooError, match=message):
        make().amputate(**settings)


def test_without_labels_mar_follows_the_first_modality() -> None:
    data = make(target=pa.nulls(ROWS, pa.string())).amputate("mar", rate=0.2)
    assert data.provenance.amputations[0].depends_on == "text"
    assert data.present[:, 0].all()
    with pytest.raises(FusionZooError, match=r"has nothing but text, which stays complete"):
        data.only("text").amputate("mar", rate=0.2)


def test_missing_mechanism_is_a_setting_of_every_data_set_and_mcar_is_as_before() -> None:
    plain = create_dataset("digits", samples=200, missing=0.3)
    named = create_dataset("digits", samples=200, missing=0.3, missing_mechanism="mcar")
    assert torch.equal(plain.present, named.present)
    data = create_dataset("interactions", samples=200, missing=0.3, missing_mechanism="mnar")
    assert (~data.present).sum(0).tolist() == [60, 60]
    with pytest.raises(FusionZooError, match="missing_mechanism= needs missing="):
        create_dataset("interactions", samples=200, missing_mechanism="mar")
    with pytest.raises(FusionZooError, match=r"missing_mechanism='random'"):
        create_dataset("digits", missing=0.3, missing_mechanism="random")
