"""Sound: integers are scaled by their type, and what is no sound is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fusionzoo as fz
from fusionzoo.datasets.media import decode_audio
from fusionzoo.errors import FusionZooError

WAVE = np.sin(np.arange(800) / 9) * 0.7
SCALED: list[tuple[Any, float]] = [
    (np.int8, 0.01),
    (np.uint8, 0.01),
    (np.int16, 1e-4),
    (np.uint16, 1e-4),
    (np.int32, 1e-6),
]


def as_integers(wave: np.ndarray, dtype: Any) -> np.ndarray:
    info = np.iinfo(dtype)
    middle = (int(info.max) + int(info.min) + 1) // 2
    return (np.round(wave * (int(info.max) - middle)) + middle).astype(dtype)


@pytest.mark.parametrize(("dtype", "close"), SCALED)
def test_integer_samples_are_scaled_by_the_full_range_of_their_type(
    dtype: Any, close: float
) -> None:
    clip = decode_audio((as_integers(WAVE, dtype), 8000))
    assert clip.samples.dtype == torch.float32
    assert np.abs(clip.samples.numpy() - WAVE).max() < close


def test_integer_tensors_are_scaled_and_floats_stay_as_they_are() -> None:
    integers = torch.from_numpy(as_integers(WAVE, np.int16))
    assert np.abs(decode_audio((integers, 8000)).samples.numpy() - WAVE).max() < 1e-4
    for floats in (WAVE, WAVE.astype(np.float32), torch.from_numpy(WAVE), WAVE.tolist()):
        expected = torch.as_tensor(np.asarray(floats, dtype=np.float32))
        assert torch.equal(decode_audio((floats, 8000)).samples, expected)
    slightly_over = 1.5 * WAVE / np.abs(WAVE).max()
    assert decode_audio((slightly_over, 8000)).samples.max() == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (32767.0 * WAVE, "peaks at .* divide by the full scale"),
        (as_integers(WAVE, np.int16).astype(np.int64), "int64, whose full scale is unknown"),
        ((32767 * WAVE).astype(np.int16).tolist(), "int64, whose full scale is unknown"),
        (WAVE > 0, "bool are no sound"),
        ([0.0, float("nan")], "no finite numbers"),
        ([0.0, float("inf")], "no finite numbers"),
        (["a"], "no sound"),
    ],
)
def test_samples_that_would_be_clipped_or_are_no_sound_are_refused(
    samples: Any, reason: str
) -> None:
    with pytest.raises(FusionZooError, match=reason):
        decode_audio((samples, 8000))


def test_a_model_answers_integers_as_it_answers_the_same_sound_in_floats() -> None:
    model = fz.create_model("concat", {"audio": "mel/stats"}, classes=["a", "b"]).eval()
    integers = as_integers(WAVE.repeat(8), np.int16)
    floats = (integers / 32768).astype(np.float32)
    samples = [{"audio": (x, 8000)} for x in (integers, torch.from_numpy(integers), floats)]
    vectors = model.embed(samples)["audio"]
    torch.testing.assert_close(vectors[0], vectors[2])
    torch.testing.assert_close(vectors[1], vectors[2])
    answers = [answer.probabilities["a"] for answer in model.predict(samples)]
    assert answers[0] == pytest.approx(answers[2], abs=1e-6)
