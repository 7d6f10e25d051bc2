"""Explanations: Shapley values of modalities, planted parts that must be found, files, the page."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusionzoo as fz
from fusionzoo import FusionZooError
from fusionzoo.cli import main
from fusionzoo.encoders import wrap_encoder
from fusionzoo.fusion import list_fusions
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.structures import Audio, Clip, Labels, keep_only
from fusionzoo.targets import AnyOf, Level, Number
from fusionzoo.tools.explain.attribution import exact_shares, sampled_shares
from fusionzoo.tools.explain.parts import PARTS, SeveralItems
from fusionzoo.tools.explain.results import Explanations

CLASSES = ("no", "yes")
FILLERS = "the old house by a river was sold to some people from town last week"
PLANTED = ("pepper", "salt")  # words of the classes
RATE, SECONDS, TONES = 4000, 6, (500.0, 1200.0)  # Hz, s, Hz of the classes
SIDE, PATCH = 32, 5  # pixels
COLUMNS = ("age", "height", "dose", "weight", "score")
CAUSE = "dose"


class PlantedSample(NamedTuple):
    """A row of raw values, its class, and where the class is told."""

    row: dict[str, Any]
    label: int
    word: str
    patch: tuple[int, int]  # top, left
    second: int


def planted_sample(seed: int) -> PlantedSample:
    """Make a sample of every modality, each of which tells the class in one place."""
    rng = np.random.default_rng(seed)
    label = seed % 2
    image = rng.integers(90, 160, (SIDE, SIDE, 3), dtype=np.uint8)
    top, left = rng.integers(0, SIDE - PATCH, 2).tolist()
    image[top : top + PATCH, left : left + PATCH] = (40, 230, 40) if label else (230, 40, 40)
    words = list(rng.choice(FILLERS.split(), 14))
    words.insert(int(rng.integers(15)), PLANTED[label])
    sound = 0.05 * rng.standard_normal(RATE * SECONDS)
    second = int(rng.integers(SECONDS))
    time = np.arange(RATE) / RATE
    sound[second * RATE : (second + 1) * RATE] += 0.5 * np.sin(2 * np.pi * TONES[label] * time)
    cells: dict[str, Any] = {name: float(rng.standard_normal()) for name in COLUMNS}
    cells[CAUSE] = (1.0 if label else -1.0) + 0.1 * cells[CAUSE]
    row = {
        "id": f"s{seed}",
        "image": image,
        "text": " ".join(words),
        "audio": (sound.astype(np.float32), RATE),
        **cells,
    }
    return PlantedSample(row, label, PLANTED[label], (top, left), second)


def colour_shares(image: Tensor) -> Tensor:
    """Return how red and how green a picture is: (2,)."""
    red, green, _ = image.float() / 255
    return 40 * torch.stack([(red - green - 0.3).relu().mean(), (green - red - 0.3).relu().mean()])


def word_counts(text: str) -> Tensor:
    """Return how often each planted word occurs: (2,)."""
    return torch.tensor([float(text.split().count(word)) for word in PLANTED])


def tone_powers(clip: Clip) -> Tensor:
    """Return the power at each planted frequency: (2,)."""
    time = torch.arange(clip.frames) / clip.rate
    waves = [torch.exp(2j * math.pi * tone * time) for tone in TONES]
    return torch.stack([50 * (clip.samples * wave).mean().abs() for wave in waves])


def planted_model(
    modalities: Sequence[str] = ("image", "text", "audio", "tabular"),
    fusion: str = "concat",
    steps: int = 60,
    **settings: Any,
) -> FusionModel:
    """Train a fusion, and a perceptron for columns, on planted samples in a second or two."""
    torch.manual_seed(0)
    prepare = {"image": colour_shares, "text": word_counts, "audio": tone_powers}
    blanks: dict[str, Any] = {"image": torch.zeros(3, 2, 2, dtype=torch.uint8), "text": ""}
    encoders: dict[str, Any] = {
        name: wrap_encoder(nn.Identity(), dim=2, processor=prepare[name], kind=name, **blank)
        for name in modalities
        if name != "tabular"
        for blank in [{"blank": blanks[name]} if name in blanks else {}]
    }
    if "tabular" in modalities:
        columns = [{"name": name, "mean": 0.0, "std": 1.0} for name in COLUMNS]
        encoders["tabular"] = {"name": "tabular/mlp", "columns": columns, "dim": 8}
    settings = {"classes": CLASSES, **settings}
    model = create_model({"name": fusion, "dim": 16}, encoders, **settings)
    if steps:
        train(model, modalities, steps)
    return model.eval()


def train(model: FusionModel, modalities: Sequence[str], steps: int) -> None:
    """Train a model on planted samples; each step hides one modality, so that it reads them all."""
    samples = [planted_sample(seed) for seed in range(1000, 1256)]
    batch = model.batch([raw_values(sample, modalities) for sample in samples])
    target = torch.tensor([sample.label for sample in samples])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(steps):
        present = batch.present.clone()
        if len(modalities) > 1:
            present[:, step % len(modalities)] = False
        loss = nn.functional.cross_entropy(model(batch._replace(present=present)).logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def raw_values(sample: PlantedSample, modalities: Sequence[str]) -> dict[str, Any]:
    """Return a sample as `model.predict` takes it."""
    values = {**sample.row, "tabular": {name: sample.row[name] for name in COLUMNS}}
    return {name: values[name] for name in modalities}


def planted_data(count: int, modalities: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Return data for `fz.explain`, and the samples in it."""
    samples = [planted_sample(seed) for seed in range(count)]
    rows = [
        {
            name: value
            for name, value in sample.row.items()
            if name == "id" or name in modalities or ("tabular" in modalities and name in COLUMNS)
        }
        for sample in samples
    ]
    columns = {"columns": {"tabular": ",".join(COLUMNS)}} if "tabular" in modalities else {}
    return {"name": "manifest", "root": rows, **columns}, samples


# ---- explanations


NAMES = ("a", "b", "c")
QUIET: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
Planted = tuple[Explanations, list[PlantedSample]]


def vector_model(fusion: str = "gmu", names: Any = NAMES, **settings: Any) -> FusionModel:
    torch.manual_seed(0)
    encoders = {name: {"name": "vector/mlp", "in_dim": 4} for name in names}
    settings = settings or {"classes": ["x", "y", "z"]}
    kinds = dict.fromkeys(names, "vector")
    model = create_model({"name": fusion, "dim": 16}, encoders, kinds=kinds, **settings)
    width = int(model.spec["num_outputs"])
    return model.complete(prior=torch.arange(1.0, width + 1) / width).eval()


def vector_rows(count: int = 5, names: Any = NAMES, missing: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"id": f"s{row}", **{n: torch.randn(4, generator=generator).tolist() for n in names}}
        for row in range(count)
    ]
    if missing:
        rows[1][names[0]] = None
    return {"name": "manifest", "root": rows, "kinds": dict.fromkeys(names, "vector")}


def sums(explanations: Explanations) -> list[float]:
    return [sum(row.modalities.values()) - (row.score - row.empty) for row in explanations]


@pytest.mark.parametrize("fusion", list_fusions())
def test_shapley_values_sum_to_the_full_score_minus_the_empty_one(fusion: str) -> None:
    explanations = fz.explain(vector_model(fusion), vector_rows(), **QUIET)
    assert sums(explanations) == pytest.approx([0] * 5, abs=1e-5)
    assert any(abs(value) > 1e-4 for value in explanations[0].modalities.values())
    lacks = explanations[1]
    assert lacks.modalities["a"] == pytest.approx(0, abs=1e-5)
    assert "a" not in lacks.without and {"b", "c"} == {*lacks.without}


def test_a_value_is_the_mean_effect_over_all_orders_of_the_modalities() -> None:
    model, data = vector_model("mbt"), vector_rows(1, missing=False)
    row = fz.explain(model, data, **QUIET)[0]
    batch = model.batch([{name: torch.tensor(data["root"][0][name]) for name in NAMES}])

    @torch.no_grad()
    def log_odds(names: tuple[str, ...]) -> float:
        shares = model.fuse(keep_only(model.encode(batch), *names)).logits.double().softmax(-1)[0]
        return float(shares[model.classes.index(row.label)].logit())

    for name in NAMES:
        effects = [
            log_odds((*order[:place], name)) - log_odds(order[:place])
            for order in permutations(NAMES)
            for place in [order.index(name)]
        ]
        assert row.modalities[name] == pytest.approx(sum(effects) / 6, abs=1e-5)
    assert row.score == pytest.approx(math.log(row.answer[1] / (1 - row.answer[1])), abs=1e-5)


def test_the_answer_without_a_modality_is_that_of_the_sample_that_lacks_it() -> None:
    model, data = vector_model(), vector_rows(1, missing=False)
    values = {name: torch.tensor(x) for name, x in data["root"][0].items() if name != "id"}
    row = fz.explain(model, data, **QUIET)[0]
    for name in NAMES:
        (answer,) = model.predict([{m: x for m, x in values.items() if m != name}])
        assert row.without[name].label == answer.label
        assert row.without[name].probability == pytest.approx(answer.probability, abs=1e-5)


TARGETS = [
    Number("age", mean=40, deviation=10),
    AnyOf("tags", classes=("sea", "sun")),
    Level("stage", classes=("1", "2", "4")),
]


def test_of_several_targets_the_chosen_one_is_explained_in_its_own_unit() -> None:
    model = vector_model(targets=TARGETS)
    age = fz.explain(model, vector_rows(), **QUIET)
    assert {row.unit for row in age} == {"units of age"}
    assert age[0].score == pytest.approx(age[0].answer, abs=1e-4)
    assert sums(age) == pytest.approx([0] * 5, abs=1e-5)
    stage = fz.explain(model, vector_rows(), answer="stage", **QUIET)
    shares = stage[0].answer.probabilities
    mean = sum(float(level) * share for level, share in shares.items())
    assert stage[0].score == pytest.approx(mean, abs=1e-5)
    assert sums(stage) == pytest.approx([0] * 5, abs=1e-5)
    tags = fz.explain(model, vector_rows(), answer="tags", label="sun", **QUIET)
    answer = tags[0].answer
    assert isinstance(answer, Labels) and tags[0].unit == "log-odds of 'sun'"
    share = answer.probabilities["sun"]
    assert tags[0].score == pytest.approx(math.log(share / (1 - share)), abs=1e-5)
    assert sums(tags) == pytest.approx([0] * 5, abs=1e-5)


def test_more_than_eight_modalities_are_estimated_with_their_error() -> None:
    names = [f"m{number}" for number in range(9)]
    rows = vector_rows(2, names, missing=False)
    explanations = fz.explain(vector_model("concat", names), rows, **QUIET)
    assert sums(explanations) == pytest.approx([0, 0], abs=1e-5)
    assert all(error > 0 for error in explanations[0].errors.values())


def test_estimates_lie_within_four_standard_errors_of_the_exact_values() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2**7, 1, generator=generator, dtype=torch.float64)
    players = [str(number) for number in range(7)]

    def evaluate(subsets: Any) -> Tensor:
        return torch.stack([table[sum(2 ** int(p) for p in subset)] for subset in subsets])

    exact = exact_shares(evaluate, players)
    sampled = sampled_shares(lambda pair: evaluate, players, 200)
    for name in players:
        gap = abs(float(exact.values[name] - sampled.values[name]))
        assert 0 < gap < 4 * float(sampled.errors[name])
        assert float(exact.errors[name]) == 0


VALUES = {
    "text": "two  words, 三个字",
    "image": torch.arange(3 * 9 * 7).reshape(3, 9, 7).to(torch.uint8),
    "audio": Audio(torch.ones(36), 4),
    "sequence": torch.arange(12.0).reshape(6, 2),
    "tabular": {"age": 4.0, "colour": "red"},
}


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_parts_cover_a_value_and_hiding_one_changes_nothing_else(kind: str) -> None:
    value, parts = VALUES[kind], PARTS[kind](4)
    other = {"age": 9.0, "colour": "blue"} if parts.method == "shapley" else None
    places = parts.split(value)
    assert 1 < len(places) <= (4 if kind != "tabular" else 2)
    assert str(parts.hide(value, places, [], other)) == str(value)
    alone = [str(parts.hide(value, places, [number], other)) for number in range(len(places))]
    assert len({*alone, str(value)}) == len(places) + 1
    spans = [place.span for place in places]
    if kind == "text":
        assert [place.name for place in PARTS[kind](9).split(value)] == ["two", "words,", *"三个字"]
        assert parts.hide(value, places, range(len(places)), other).strip() == ""
    if kind == "image":
        assert sum((b - t) * (r - left) for t, left, b, r in spans) == 9 * 7
    if kind == "audio":
        assert spans[0][0] == 0 and spans[-1][1] == 9 and len(PARTS[kind](99).split(value)) == 9
        assert parts.hide(value, places, [0], other).samples.sum() == 36 * 3 / 4
    if kind == "tabular":
        assert parts.hide(value, places, [1], other) == {"age": 4.0, "colour": "blue"}


def test_of_several_pictures_each_is_a_part() -> None:
    items = SeveralItems(64)
    places = items.split(["first", "second", "third"])
    assert [place.name for place in places] == ["item 1", "item 2", "item 3"]
    assert items.hide(["first", "second", "third"], places, [1], None) == ["first", "third"]
    assert items.hide(["first", "second"], items.split(["first", "second"]), [0], None) == "second"


@pytest.fixture(scope="module")
def planted() -> Planted:
    """Three explained samples of four modalities; the second lacks its text."""
    names = ["image", "text", "audio", "tabular"]
    model, (data, samples) = planted_model(names, steps=0), planted_data(3, names)
    data["root"][0]["text"] = f"<b>bold</b> & {PLANTED[0]}"
    data["root"][1]["text"] = None
    return fz.explain(model, data, parts=16, background=2, samples=2, **QUIET), samples


def test_a_page_shows_every_kind_of_value(planted: Planted, tmp_path: Path) -> None:
    page = planted[0].to_html(tmp_path / "why.html").read_text()
    assert page.count("<article") == 2
    for piece in ("<audio controls", 'class="heat"', 'class="words"', "dose: ", "without it"):
        assert piece in page
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page
    assert "2 of 3 samples, drawn at random" in page


def test_figures_are_written_as_json_and_csv(planted: Planted, tmp_path: Path) -> None:
    explanations, _ = planted
    written = json.loads(explanations.save(tmp_path / "why.json").read_text())
    assert [row["id"] for row in written["samples"]] == ["s0", "s1", "s2"]
    parts = [row["parts"] for row in written["samples"] if row["parts"]]
    assert len(parts) == 2 and {"name", "value", "span", "error"} == {*parts[0]["image"][0]}
    with explanations.save(tmp_path / "why.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["shapley_audio"]) == explanations[0].modalities["audio"]
    assert rows[1]["without_text"] == "" and rows[1]["without_audio"] in ("no", "yes")
    with pytest.raises(FusionZooError, match=r"\.json or \.csv"):
        explanations.save(tmp_path / "why.txt")


def test_the_summary_counts_what_decides(planted: Planted) -> None:
    explanations, _ = planted
    summary = explanations.summary
    assert sum(summary.decides.values()) == pytest.approx(1)
    sizes = [abs(row.modalities["audio"]) for row in explanations]
    assert summary.mean_size["audio"] == pytest.approx(sum(sizes) / 3)


def test_columns_sum_to_the_score_minus_its_mean_with_the_cells_of_other_samples() -> None:
    model, (data, _) = planted_model(["tabular"], steps=5), planted_data(4, ["tabular"])
    explanations = fz.explain(model, data, background=4, **QUIET)
    signs = [1 if row.label == "no" else -1 for row in explanations]
    mean = sum(sign * row.score for sign, row in zip(signs, explanations, strict=True)) / 4
    for sign, row in zip(signs, explanations, strict=True):
        added = sum(part.value for part in row.parts["tabular"])
        assert added == pytest.approx(row.score - sign * mean, abs=1e-4)


def test_mistakes_are_named() -> None:
    model, data = vector_model(targets=TARGETS), vector_rows()
    with pytest.raises(FusionZooError, match="'age'"):
        fz.explain(model, data, answer="agee", **QUIET)
    with pytest.raises(FusionZooError, match="no classes or labels"):
        fz.explain(model, data, answer="age", label="sun", **QUIET)
    with pytest.raises(FusionZooError, match="Did you mean 'sun'"):
        fz.explain(model, data, answer="tags", label="sum", **QUIET)
    with pytest.raises(FusionZooError, match="without a target"):
        fz.explain(vector_model(num_outputs=2), data, **QUIET)


def test_the_command_explains_a_trained_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("red", "green", "blue")
    lines = [
        f"s{n},{('train', 'val', 'test')[n % 3]},{words[n % 4 % 3]},{words[n % 4 % 3]} {n},{n}"
        for n in range(36)
    ]
    table = tmp_path / "my.csv"
    table.write_text("\n".join(["id,split,target,text,size", *lines]) + "\n")
    settings = {"columns": {"tabular": "size"}}
    fz.train(
        {"name": "manifest", "root": str(table), **settings},
        encoders={"text": {"name": "chars", "dim": 16}},
        **{"epochs": 1, "num_workers": 0, "log": "none", "device": "cpu", "out": tmp_path / "a"},
    )
    flags = ["--samples", "2", "--split", "test", "--num_workers", "0"]
    files = ["--html", str(tmp_path / "why.html"), "--out", str(tmp_path / "why.json")]
    capsys.readouterr()
    columns = ["--data.columns.tabular", "size"]
    assert main(["explain", str(tmp_path / "a"), str(table), *columns, *flags, *files]) == 0
    printed = capsys.readouterr().out
    assert "mean |Shapley|" in printed and "16 samples of the training split" not in printed
    assert "12 samples of the training split" in printed
    samples = json.loads((tmp_path / "why.json").read_text())["samples"]
    assert len(samples) == 12 and sum(bool(row["parts"]) for row in samples) == 2
    assert main(["explain", str(tmp_path / "a"), "--split", "test", "--samples", "0"]) == 0
    assert main(["explain", str(tmp_path / "a"), "--out", "why.txt"]) == 2
    assert main(["explain"]) == 2


def found(kind: str, parts: list[Any], sample: PlantedSample) -> bool:
    """Whether the part that adds most is the planted one."""
    best = max(parts, key=lambda part: abs(part.value))
    if kind == "text":
        return bool(best.name == sample.word)
    if kind == "tabular":
        return bool(best.name == CAUSE)
    if kind == "audio":
        return bool(best.span == (sample.second, sample.second + 1))
    top, left, bottom, right = best.span
    y, x = sample.patch
    return bool(top < y + PATCH and bottom > y and left < x + PATCH and right > x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "text", "audio", "tabular"])
@pytest.mark.parametrize("fusion", ["concat", "late_mean", "mbt"])
def test_the_planted_part_is_found_in_95_of_100_samples(kind: str, fusion: str) -> None:
    other = "text" if kind != "text" else "image"
    model, (data, samples) = planted_model([kind, other], fusion), planted_data(100, [kind, other])
    explanations = fz.explain(model, data, samples=100, background=8, **QUIET)
    pairs = zip(explanations, samples, strict=True)
    assert sum(found(kind, row.parts[kind], sample) for row, sample in pairs) >= 95
