"""Encoders of a table's columns: what a missing, unknown or odd cell does to the features."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import fusionzoo
from fusionzoo import create_encoder, create_model
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.tabular import (
    NumberCode,
    NumberEmbedding,
    Numbers,
    PiecewiseLinear,
    read_columns,
)
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features
from fusionzoo.testing.encoders import features_of

AGE: dict[str, Any] = {"name": "age", "mean": 40.0, "std": 10.0, "edges": [20, 35, 45.5, 80]}
SIZE: dict[str, Any] = {"name": "size", "mean": 1.0, "std": 0.5, "edges": [0.5, 2]}
ALWAYS: dict[str, Any] = {"name": "always", "mean": 3.0, "std": 1.0, "edges": [3]}
COLOUR: dict[str, Any] = {"name": "colour", "values": ["blue", "red"]}
CODE: dict[str, Any] = {"name": "code", "values": ["1", "2"]}
COLUMNS = [AGE, COLOUR, SIZE, CODE]
ROW = {"age": 52, "colour": "red", "size": "1.5", "code": 2}
SMALL = {
    "tabular/mlp": {"dim": 8, "hidden": 16, "category_dim": 4},
    "tabular/ft-transformer": {"dim": 16, "num_heads": 2, "num_layers": 2},
}
NAMES = pytest.mark.parametrize("name", SMALL)
CODED = pytest.mark.parametrize(
    ("name", "code"), [(name, code) for name in SMALL for code in get_args(NumberCode)]
)


def build(
    name: str, columns: list[dict[str, Any]] = COLUMNS, code: NumberCode = "linear"
) -> Encoder:
    torch.manual_seed(0)
    settings = {**SMALL[name], "columns": columns, "numbers": code}
    return create_encoder("tabular", name, **settings).eval()


def features(encoder: Encoder, *rows: dict[str, Any]) -> Features:
    return features_of(encoder, rows)


def item(row: dict[str, Any], columns: list[dict[str, Any]] = COLUMNS) -> dict[str, Any]:
    prepared = create_encoder("tabular", "tabular/mlp", columns=columns).processor(False)(row)
    return {name: x.tolist() for name, x in prepared.items()}


def test_cells_are_standardised_and_coded_whatever_their_types_and_order() -> None:
    expected = {"known": [True] * 4, "codes": [0, 3, 0, 3]}
    expected["values"] = pytest.approx([1.2, 0.0, 1.0, 0.0])
    assert item(ROW) == expected
    others = [
        {"code": "2", "size": 1.5, "colour": " red".strip(), "age": "52"},
        {" Age": 52.0, "COLOUR": "red", "size": "1.50", "code": "2.0"},
        {**ROW, "code": 2.0},
    ]
    assert [item(row) for row in others] == [item(ROW)] * 3


def test_unknown_and_missing_categories_have_codes_and_a_number_far_from_others_is_finite() -> None:
    items = [item({**ROW, "colour": colour}) for colour in ("green", None, "blue")]
    assert [x["codes"][1] for x in items] == [0, 1, 2]
    assert [x["known"][1] for x in items] == [True, False, True]
    far = [item({**ROW, "age": age})["values"][0] for age in (1e300, -1e300)]
    assert far == [100.0, -100.0]


def place(x: float, edges: list[float]) -> list[float]:
    """Code a number as arXiv:2203.05556 writes it: equation 1, bin by bin."""
    coded = []
    for number, (low, high) in enumerate(pairwise(edges), start=1):
        if x < low and number > 1:
            coded.append(0.0)
        elif x >= high and number < len(edges) - 1:
            coded.append(1.0)
        else:
            coded.append((x - low) / (high - low))
    return coded


@pytest.mark.parametrize("x", [-3.0, 20, 27.3, 35, 45.5, 50, 80, 95, 200])
def test_a_number_is_coded_by_its_place_among_the_bins_of_its_column(x: float) -> None:
    columns = [x for x in read_columns([AGE, SIZE, ALWAYS]) if isinstance(x, Numbers)]
    scaled = [column.encode(x)[0] for column in columns]  # at most 100 standard deviations
    age, size, always = (
        column.mean + column.std * z for column, z in zip(columns, scaled, strict=True)
    )
    expected = [place(age, AGE["edges"]), [*place(size, SIZE["edges"]), 0, 0], [always - 3, 0, 0]]
    coded = PiecewiseLinear(columns)(torch.tensor([scaled]))
    torch.testing.assert_close(coded, torch.tensor([expected]), rtol=1e-5, atol=1e-5)


def test_bins_that_single_precision_cannot_tell_apart_are_one() -> None:
    edges = (0.0, 1.0, 1.0 + 1e-12, 2.0)
    coded = PiecewiseLinear([Numbers("x", 0.0, 1.0, edges)])(torch.tensor([[1.5], [1e9]]))
    torch.testing.assert_close(coded, torch.tensor([[[1.0, 0.5]], [[1.0, 100.0]]]))


@pytest.mark.parametrize("code", ["piecewise", "periodic", "periodic_lite"])
def test_an_embedding_of_numbers_is_a_linear_map_of_their_code_and_relu(code: NumberCode) -> None:
    """Against a loop over the columns, in double precision."""
    columns = [Numbers("a", 0.0, 1.0, (-1, 0, 0.5, 2)), Numbers("b", 1.0, 2.0, (-5, 4))]
    embed: Any = NumberEmbedding(columns, 7, code, frequencies=5, sigma=0.7)
    numbers = torch.randn(4, 2)
    rows = []
    for j, edges in enumerate(([-1, 0, 0.5, 2], [-3, 1.5])):  # b's are standardised
        own = 0 if code == "periodic_lite" else j
        for x in numbers[:, j].double().tolist():
            if code == "piecewise":
                coded = torch.tensor([*place(x, edges), 0, 0][:3]).double()
            else:
                angles = 2 * math.pi * x * embed.code.frequencies[j].double()
                coded = torch.cat([torch.sin(angles), torch.cos(angles)])
            mapped = embed.weight[own].double().T @ coded + embed.bias[own].double()
            rows.append(mapped.clamp(min=0))
    expected = torch.stack(rows).unflatten(0, (2, 4)).transpose(0, 1).float()
    torch.testing.assert_close(embed(numbers), expected, rtol=1e-5, atol=1e-5)
    assert len(embed.weight) == (1 if code == "periodic_lite" else 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numbers": "pieces"}, "should be 'linear', 'piecewise'"),
        ({"numbers": "piecewise", "bins": 0}, "bins=0; it must be a number of at least 1"),
        ({"numbers": "periodic", "sigma": 0.0}, "sigma=0.0: it must be above 0"),
        ({"numbers": "piecewise", "columns": [{"name": "b", "mean": 0, "std": 1}]}, "'b' has no"),
    ],
)
@NAMES
def test_settings_of_numbers_that_make_no_sense_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FusionZooError, match=message):
        create_encoder("tabular", name, **{"columns": [AGE], **settings})


@CODED
def test_a_missing_number_is_the_mean_until_training_says_otherwise(
    name: str, code: NumberCode
) -> None:
    encoder = build(name, code=code)
    rows = [{**ROW, "age": None}, {**ROW, "age": 40}, ROW]
    missing, mean, other = features(encoder, *rows).pooled
    torch.testing.assert_close(missing, mean)
    assert not torch.allclose(missing, other)
    prepare = encoder.processor(True)
    encoder(prepare.collate([prepare(row) for row in rows])).pooled[0].square().sum().backward()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter -= 0.1 * parameter.grad
    missing, mean, _ = features(encoder, *rows).pooled
    assert not torch.allclose(missing, mean, atol=1e-5)


@NAMES
def test_an_unknown_category_changes_nothing_that_was_not_learnt(name: str) -> None:
    """Its embedding is zero, as is that of a missing one in data without missing cells."""
    unknown, other, missing = features(
        build(name), *({**ROW, "colour": colour} for colour in ("green", "violet", None))
    ).pooled
    torch.testing.assert_close(unknown, other)
    torch.testing.assert_close(unknown, missing)


@pytest.mark.parametrize("columns", [COLUMNS, [AGE], [COLOUR], [COLOUR, AGE], [CODE, COLOUR]])
def test_the_transformer_has_a_token_per_column(columns: list[dict[str, Any]]) -> None:
    encoder = build("tabular/ft-transformer", columns)
    row = {column["name"]: ROW[column["name"]] for column in columns}
    out = features(encoder, row, row)
    assert out.tokens.shape == (2, 1 + len(columns), 16)
    assert out.mask.all()
    torch.testing.assert_close(out.tokens[:, 0], out.pooled)


def test_the_tokens_stand_in_the_order_of_the_columns() -> None:
    """Without a layer, each token depends on its column alone."""
    encoder = create_encoder(
        "tabular", "tabular/ft-transformer", columns=COLUMNS, dim=16, num_heads=2, num_layers=0
    ).eval()
    whole = features(encoder, ROW).tokens[0]
    for place, column in enumerate(COLUMNS):
        other = 7 if "mean" in column else column["values"][0]
        changed = features(encoder, {**ROW, column["name"]: other}).tokens[0]
        differs = (changed - whole).abs().amax(1) > 1e-6
        assert differs.nonzero()[:, 0].tolist() == [1 + place]


def test_a_layer_is_the_published_one() -> None:
    """Against the equations of arXiv:2106.11959, section 3.3, with weights taken apart."""
    encoder = build("tabular/ft-transformer")
    layers: Any = encoder.layers
    assert [type(layer.norm_attention).__name__ for layer in layers] == ["Identity", "LayerNorm"]
    x = torch.randn(3, 5, 16)
    layer = layers[1]
    normed = layer.norm_attention(x)
    y = x + layer.attention(normed, normed, normed)[0]
    weight, bias = layer.expand.weight, layer.expand.bias
    values, gates = layer.norm_hidden(y) @ weight.T + bias, None
    half = len(weight) // 2
    values, gates = values[..., :half], values[..., half:]
    expected = y + layer.contract(values * gates.clamp(min=0))
    torch.testing.assert_close(layer(x), expected)
    assert half == 21  # 4/3 of the width


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "age": "old"}, "column 'age': 'old' is not a number"),
        ({**ROW, "age": "12,5"}, "'12,5' is not a number"),
        ({**ROW, "age": float("inf")}, "column 'age': inf is not a number"),
        ({**ROW, "agee": 3}, "reads no column 'agee'. Did you mean 'age'?"),
        ({"age": 1, "colour": "red", "size": 1}, "column 'code' is missing among age, colour"),
        ({**ROW, "Age": 1}, "column 'age' is there twice"),
    ],
)
def test_a_cell_or_column_that_does_not_fit_is_one_clear_error(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(FusionZooError) as caught:
        item(row)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [
        [],
        [{"name": "age"}],
        [{"name": "age", "mean": 0.0, "std": 0.0}],
        [{"name": "age", "mean": float("nan"), "std": 1.0}],
        [{"name": "age", "mean": True, "std": 1.0}],
        [{"name": "age", "mean": 0.0, "std": 1.0, "edges": [1, 1]}],
        [{"name": "age", "mean": 0.0, "std": 1.0, "edges": [0, float("inf")]}],
        [{"name": "age", "mean": 0.0, "std": 1.0, "edges": []}],
        [{"name": "age", "mean": 0.0, "std": 1.0, "range": [0]}],
        [{"name": "age", "mean": 0.0, "std": 1.0, "range": [0, "1"]}],
        [{"name": 3, "values": ["a"]}],
        [{"name": "a", "values": "abc"}],
        [{"name": "a", "values": ["x", "x"]}],
        [{"name": "a", "values": [1]}],
        [AGE, {"name": " AGE ", "values": ["x"]}],
    ],
)
def test_columns_that_make_no_sense_are_refused(columns: list[dict[str, Any]]) -> None:
    with pytest.raises(FusionZooError, match="column"):
        create_encoder("tabular", "tabular/mlp", columns=columns)


@CODED
def test_a_stored_model_answers_new_rows_without_the_data(
    name: str, code: NumberCode, tmp_path: Path
) -> None:
    columns = [*COLUMNS, {"name": "place, the", "values": ["Å", "b c"]}]
    torch.manual_seed(0)
    settings = {"name": name, "columns": columns, "numbers": code, **SMALL[name]}
    model = create_model("gmu", {"tabular": settings, "text": "chars"}, classes=["a", "b"]).eval()
    model.save(tmp_path / "model")
    loaded = fusionzoo.load(tmp_path / "model")
    cells = {**ROW, "place, the": "Å"}
    samples = [
        {"tabular": cells},
        {"tabular": {**cells, "colour": "new", "age": None, "size": 1e30}, "text": "hello"},
        {"text": "hello", "tabular": dict.fromkeys(cells)},
        {"text": "hello"},
    ]
    answers, expected = (x.predict(samples) for x in (loaded, model))
    assert answers == expected
    assert answers[2].label == answers[3].label
    empty, lacking = (x.probabilities for x in answers[2:])
    assert empty == pytest.approx(lacking, abs=1e-5), "a sample of empty cells lacks the modality"
    assert answers[0] != answers[1]
