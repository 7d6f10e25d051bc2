"""Models of time series: the numbers of the library, whatever a series' length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionzoo import create_dataset, create_encoder
from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features
from fusionzoo.testing.encoders import CHECKS, features_of, maker
from fusionzoo.training.build import choose_encoders
from helpers.tiny_models import save_series

FAMILIES = ("patchtst", "patchtsmixer", "timesfm", "timesfm2_5")
EACH = pytest.mark.parametrize("family", FAMILIES)
STEPS, CHANNELS = 16, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {x: save_series(tmp_path_factory.mktemp(x), x, CHANNELS) for x in FAMILIES}


def build(folder: Path, **settings: Any) -> Encoder:
    return create_encoder("sequence", f"hf/{folder}", in_dim=CHANNELS, **settings).eval()


def features(encoder: Encoder, *series: Tensor) -> Features:
    return features_of(encoder, series)


def draw(steps: int, level: float = 0.0) -> Tensor:
    return level + torch.randn(steps, CHANNELS, generator=torch.Generator().manual_seed(steps))


@torch.no_grad()
def by_library(folder: Path, series: Tensor, padding: int = 0) -> Tensor:
    """Run the bare model on one series (T, C); return (N, C, D). The first steps are padding."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    hidden = torch.ones_like(series)
    hidden[:padding] = 0
    if model.config.model_type == "patchtst":
        out = model(past_values=series[None], past_observed_mask=hidden[None])
    elif model.config.model_type == "patchtsmixer":
        out = model(past_values=series[None], observed_mask=hidden[None])
    else:
        options: dict[str, Tensor] = {"past_values_padding": 1 - hidden.T}
        if model.config.model_type == "timesfm":
            options["freq"] = torch.zeros(CHANNELS, 1, dtype=torch.long)
        return model(past_values=series.T, **options).last_hidden_state.transpose(0, 1)
    return out.last_hidden_state[0].transpose(0, 1)


@EACH
def test_tokens_are_what_the_library_makes_of_each_patch(
    family: str, folders: dict[str, Path]
) -> None:
    series = draw(STEPS)
    expected = by_library(folders[family], series)
    out = features(build(folders[family]), series, draw(7))
    torch.testing.assert_close(out.tokens[0], expected.flatten(1))
    torch.testing.assert_close(out.pooled[0], expected.flatten(1).mean(0))
    averaged = features(build(folders[family], channels="mean"), series)
    torch.testing.assert_close(averaged.tokens[0], expected.mean(1))


@EACH
def test_a_longer_series_is_read_from_its_end(family: str, folders: dict[str, Path]) -> None:
    encoder, series = build(folders[family]), draw(40)
    short = build(folders[family], max_length=6)
    for one, steps in ((encoder, STEPS), (short, 6)):
        expected = features(encoder, series[-steps:]).pooled
        torch.testing.assert_close(features(one, series).pooled, expected)


@EACH
def test_a_shorter_series_is_padded_in_front_and_its_padding_is_masked(
    family: str, folders: dict[str, Path]
) -> None:
    encoder, series = build(folders[family]), draw(6, level=50)
    alone, beside = features(encoder, series), features(encoder, series, draw(STEPS))
    assert beside.mask.tolist() == [[False, False, True, True], [True] * 4]
    filling = series.mean(0) if family.startswith("patch") else torch.zeros(CHANNELS)
    padded = torch.cat([filling.expand(STEPS - 6, -1), series])
    expected = by_library(folders[family], padded, padding=STEPS - 6)[-2:].flatten(1)
    for out in (alone, beside):
        torch.testing.assert_close(out.tokens[0][out.mask[0]], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.pooled[0], expected.mean(0), rtol=1e-4, atol=1e-4)


def test_where_a_model_standardises_the_level_of_a_short_series_changes_nothing(
    folders: dict[str, Path],
) -> None:
    for family in ("patchtst", "patchtsmixer"):
        encoder = build(folders[family])
        low, high = (features(encoder, draw(6, level=x)).pooled for x in (0, 100))
        torch.testing.assert_close(low, high, rtol=1e-3, atol=1e-3)


def test_masks_of_class_tokens_and_of_patches_that_overlap(tmp_path: Path) -> None:
    folder = save_series(tmp_path, "patchtst", CHANNELS, use_cls_token=True, scaling=None)
    out = features(build(folder), draw(6), draw(STEPS))
    assert out.mask.tolist() == [[True, False, False, True, True], [True] * 5]
    torch.testing.assert_close(out.tokens[:, 0], out.pooled)
    torch.testing.assert_close(out.tokens[1], by_library(folder, draw(STEPS)).flatten(1))
    folder = save_series(tmp_path / "b", "patchtst", CHANNELS, patch_stride=3)
    out = features(build(folder), draw(3), draw(4), draw(STEPS))
    assert out.mask.sum(1).tolist() == [1, 2, 5]


def test_a_pretraining_checkpoint_hides_no_patch(tmp_path: Path) -> None:
    plain = save_series(tmp_path / "a", "patchtst", CHANNELS)
    masked = save_series(tmp_path / "b", "patchtst", CHANNELS, do_mask_input=True)
    series = draw(STEPS)
    outs = [features(build(x), series).tokens for x in (plain, masked, masked)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])


def test_the_frequency_reaches_timesfm(folders: dict[str, Path]) -> None:
    monthly, daily = (build(folders["timesfm"], frequency=x) for x in (1, 0))
    assert not torch.allclose(features(monthly, draw(9)).pooled, features(daily, draw(9)).pooled)
    with pytest.raises(FusionZooError, match=r"frequency=3: .* knows 0 to 2"):
        build(folders["timesfm"], frequency=3)


@pytest.mark.parametrize("family", ["bert", "informer", "autoformer", "time_series_transformer"])
def test_a_model_that_reads_no_series_alone_is_refused(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    reason = "reads no series" if family == "bert" else "reads the dates of the steps"
    with pytest.raises(FusionZooError, match=reason) as caught:
        build(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["patchtst", "patchtsmixer"])
def test_another_number_of_channels_is_one_clear_error(
    family: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(FusionZooError, match=r"made for 3 channels .*, and the series have 2"):
        create_encoder("sequence", f"hf/{folders[family]}", in_dim=2)
    with pytest.raises(FusionZooError, match=r"expected \(T, 3\)"):
        build(folders[family]).processor(False)(torch.zeros(4, 2))


def test_the_data_set_tells_the_number_of_channels(folders: dict[str, Path]) -> None:
    rows = [{"sequence": draw(5).numpy(), "target": "a"}]
    settings = {"sequence": {"name": f"hf/{folders['timesfm']}"}}
    chosen = choose_encoders(create_dataset(rows), settings)
    assert chosen["sequence"]["in_dim"] == CHANNELS


@EACH
def test_a_trained_model_answers_alike_once_it_is_loaded(
    family: str, folders: dict[str, Path]
) -> None:
    make = maker(f"hf/{folders[family]}", {"kind": "sequence", "in_dim": CHANNELS})
    CHECKS["a_trained_model_answers_alike_once_it_is_loaded"](make)
