"""Sound: integers are scaled by their type, and of a long file only the window is read."""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

import fusionzoo as fz
from fusionzoo.datasets.media.audio import AudioFile, Segment, decode_audio
from fusionzoo.datasets.media.budgets import BUDGETS
from fusionzoo.encoders.audio import WaveProcessor
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import corrupt
from fusionzoo.ground.resampling import resampler
from fusionzoo.structures import Audio
from helpers.memory import at_most

RATE = 44_100
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
        (as_integers(WAVE, np.int16).astype(np.int64), "int64: give int16, int32 or floats"),
        ((32767 * WAVE).astype(np.int16).tolist(), "int64: give int16, int32 or floats"),
        (WAVE > 0, "bool are not audio"),
        ([0.0, float("nan")], "are not finite"),
        ([0.0, float("inf")], "are not finite"),
        (["a"], "are not audio"),
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


# ---- long files


def stored(path: Path, seconds: float = 30, channels: int = 2) -> Path:
    """Write noise under a slow tone, in blocks: Vorbis does not take much at a time."""
    draw = np.random.default_rng(0)
    tone = 0.5 * np.sin(np.arange(round(seconds * RATE)) / 5000)
    wave = tone[:, None] + 0.1 * draw.standard_normal((len(tone), channels))
    with soundfile.SoundFile(path, "w", RATE, channels) as file:
        for start in range(0, len(wave), 8192):
            file.write(wave[start : start + 8192])
    return path


def whole_then_cut(
    path: Path, rate: int, duration: float, generator: torch.Generator | None
) -> Tensor:
    """The window as it would be cut from the clip decoded and resampled whole."""
    samples = soundfile.read(path, dtype="float32", always_2d=True)[0].mean(1)
    wave = torch.from_numpy(samples)
    if rate != RATE:
        wave = resampler(RATE, rate)(wave)
    room = round(duration * rate)
    spare = max(0, len(wave) - room)
    start = spare // 2
    if spare and generator is not None:
        start = int(torch.randint(spare + 1, (1,), generator=generator))
    return wave[start : start + room]


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize("rate", [16_000, 48_000, RATE])
def test_a_window_read_from_a_file_equals_the_one_cut_from_the_whole_clip(
    suffix: str, rate: int, tmp_path: Path
) -> None:
    path = stored(tmp_path / f"a.{suffix}", 12)
    clip = decode_audio(path)
    assert not isinstance(clip, Audio)
    prepare = WaveProcessor(rate, 1.0)
    for seed in (None, 0, 1, 2):
        draws = [None if seed is None else torch.Generator().manual_seed(seed) for _ in "ab"]
        expected = whole_then_cut(path, rate, 1.0, draws[0])
        window = prepare(clip, draws[1])["wave"] / 32767
        assert len(window) == rate
        assert (window - expected).abs().max() < 1e-4  # int16 rounds to 3e-5


def test_both_ends_of_a_clip_equal_those_of_the_whole_clip(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.flac", 12)
    nearly_all = WaveProcessor(16_000, 11.999)(decode_audio(path))["wave"] / 32767
    expected = whole_then_cut(path, 16_000, 11.999, None)
    assert (nearly_all - expected).abs().max() < 1e-4
    everything = WaveProcessor(16_000, 20.0, 0.1)(decode_audio(path))["wave"]
    assert len(everything) == 12 * 16_000


def test_a_long_clip_is_read_in_the_memory_of_its_window(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.flac", 120)
    with at_most(2_000_000):  # of 21 MB mono, 42 MB stereo
        assert len(WaveProcessor(16_000, 1.0)(decode_audio(path))["wave"]) == 16_000


def test_a_clip_in_a_file_travels_to_other_processes_and_has_all_its_samples(
    tmp_path: Path,
) -> None:
    path = stored(tmp_path / "a.wav", 12)
    samples = soundfile.read(path, dtype="float32")[0].mean(1)
    for source in (path, str(path), path.read_bytes()):
        clip = pickle.loads(pickle.dumps(decode_audio(source)))
        assert (clip.rate, clip.frames) == (RATE, 12 * RATE)
        assert np.array_equal(clip.samples.numpy(), samples)
        assert np.array_equal(clip.read(12 * RATE - 5, 100).numpy(), samples[-5:])
        quiet = corrupt(clip, "audio", "gain", 2)
        assert np.allclose(quiet.samples.numpy(), samples / 10, atol=1e-6)


def test_damage_in_a_long_file_is_one_error_that_names_it(tmp_path: Path) -> None:
    flac = stored(tmp_path / "cut.flac", 12)
    flac.write_bytes(flac.read_bytes()[: flac.stat().st_size // 4])
    samples = np.zeros(12 * RATE, np.float32)
    samples[6 * RATE] = np.inf
    soundfile.write(tmp_path / "inf.wav", samples, RATE, subtype="FLOAT")
    loud = 20_000 * np.sin(np.arange(12 * RATE) / 9)
    soundfile.write(tmp_path / "loud.wav", loud, RATE, subtype="FLOAT")
    for name, reason in (
        ("cut.flac", r"cut\.flac (is damaged|cannot be read)"),
        ("inf.wav", r"inf\.wav contains samples that are not finite"),
        ("loud.wav", r"loud\.wav peaks at 20000"),
    ):
        with pytest.raises(FusionZooError, match=reason):
            WaveProcessor(16_000, 1.0)(decode_audio(tmp_path / name))


def test_a_clip_too_long_to_hold_is_refused_only_where_all_of_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = decode_audio(stored(tmp_path / "a.flac", 12))
    smaller = replace(BUDGETS["samples"], limit=500_000)
    monkeypatch.setitem(BUDGETS, "samples", smaller)
    assert len(WaveProcessor(16_000, 1.0)(clip)["wave"]) == 16_000
    with pytest.raises(FusionZooError, match=r"a\.flac is too large: 529,200 samples"):
        _ = clip.samples


# ---- lengths in headers


TONE = (9000 * np.sin(np.arange(50_000) / 10)).astype("<i2")
GUID = bytes.fromhex("f3acd3118cd100c04f8edb8a")  # of Wave64, behind a chunk's name
# The length that a header announces: its format, the bytes before it, and how it is written.
FIELDS = {
    "WAV": (b"data", "<I"),
    "RIFX": (b"data", ">I"),
    "AIFF": (b"SSND", ">I"),
    "AU": (b".snd\0\0\0\x18", ">I"),
    "W64": (b"data" + GUID, "<Q"),
    "RF64": (b"ds64\x1c\0\0\0" + bytes(8), "<Q"),
}


def in_format(kind: str, wave: np.ndarray = TONE) -> bytes:
    buffer = io.BytesIO()
    endian = "BIG" if kind == "RIFX" else None
    kind = kind.replace("RIFX", "WAV")
    subtype = None if kind == "MP3" else "PCM_16"
    soundfile.write(buffer, wave, 16_000, format=kind, subtype=subtype, endian=endian)
    data = bytearray(buffer.getvalue())
    if kind == "RF64":
        data[20:28] = bytes(8)  # the length of the file, which the marker in `FIELDS` includes
    return bytes(data)


def announcing(length: int, kind: str) -> bytes:
    """A file whose header has another length of its samples."""
    data = bytearray(in_format(kind))
    name, form = FIELDS[kind]
    struct.pack_into(form, data, data.index(name) + len(name), length)
    return bytes(data)


def stream_of_flac() -> bytes:
    data = bytearray(in_format("FLAC"))
    data[21] &= 0xF0  # 36 bits are the number of samples
    data[22:26] = bytes(4)
    return bytes(data)


STREAMS = {
    "WAV, 0": announcing(0, "WAV"),
    "WAV of SoX": announcing(0x7FFFF000, "WAV"),
    "WAV of SoX in blocks of 6": announcing(0x7FFFF000 // 6 * 6, "WAV"),
    "WAV less its header": announcing(0xFFFFFFFF - 44, "WAV"),
    "WAV of FFmpeg": announcing(0xFFFFFFFF, "WAV"),
    "big-endian WAV": announcing(0x80000000, "RIFX"),
    "AIFF, 0": announcing(0, "AIFF"),
    "AIFF, no samples": announcing(8, "AIFF"),
    "AIFF of SoX": announcing(0x7F000008, "AIFF"),
    "AU, 0": announcing(0, "AU"),
    "AU, unknown": announcing(0xFFFFFFFF, "AU"),
    "W64, no samples": announcing(24, "W64"),
    "W64 of FFmpeg": announcing(2**63 - 1, "W64"),
    "RF64, 0": announcing(0, "RF64"),
    "RF64, unknown": announcing(2**64 - 1, "RF64"),
    "FLAC": stream_of_flac(),
}


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionzoo.errors._warned", {})


def check_all_is_read(data: bytes, path: Path, reason: str, caplog: Any) -> None:
    """All of a file, and a part, is read by path and from memory; each is said once."""
    path.write_bytes(data)
    expected = torch.from_numpy(TONE / np.float32(32768))
    for source in (path, data):
        assert torch.equal(decode_audio(source).samples, expected)
        part = decode_audio(Segment(source, 2.9, 3.0))
        assert torch.equal(part.samples, expected[46_400:48_000])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{name}: {reason}" for name in (path, "<bytes>")]


@pytest.mark.parametrize("name", STREAMS)
def test_all_is_read_of_a_stream_without_a_length_which_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "its header has no length, as that of a stream; all that it holds is read"
    check_all_is_read(STREAMS[name], tmp_path / "piped", reason, caplog)
    assert (tmp_path / "piped").read_bytes() == STREAMS[name]


def test_of_many_streams_the_first_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(12):
        (tmp_path / f"{number}.wav").write_bytes(STREAMS["WAV, 0"])
        decode_audio(tmp_path / f"{number}.wav")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 10
    assert messages[9].startswith(f"{tmp_path / '9.wav'}: ")
    assert messages[9].endswith("; further files like it are not named")


@pytest.mark.parametrize("kind", FIELDS)
def test_a_file_that_was_cut_off_is_refused_in_every_format(kind: str, tmp_path: Path) -> None:
    whole = in_format(kind)
    path = tmp_path / "cut"
    path.write_bytes(whole[: len(whole) // 2])
    missing = f"{len(whole) - len(whole) // 2:,}"
    with pytest.raises(FusionZooError, match=rf"cut is cut off: its header announces {missing} b"):
        decode_audio(path)


@pytest.mark.parametrize("announced", [1, 20_000, 47_999, 48_001, 2**36 - 1])
@pytest.mark.parametrize("has_longest", [True, False])
def test_all_is_read_of_a_flac_that_announces_another_length_which_is_said(
    announced: int, has_longest: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(in_format("FLAC"))
    if not has_longest:
        data[15:18] = bytes(3)
    data[21:26] = ((data[21] & 0xF0) << 32 | announced).to_bytes(5)
    reason = "its header announces another number of samples than it holds"
    check_all_is_read(bytes(data), tmp_path / "a.flac", reason, caplog)


def test_all_is_read_of_a_flac_of_one_short_frame() -> None:
    data = bytearray(in_format("FLAC", TONE[:40]))
    data[25] = 30
    assert len(decode_audio(bytes(data)).samples) == 40


def test_chunks_behind_the_samples_are_no_samples(caplog: pytest.LogCaptureFixture) -> None:
    notes = b"LIST" + struct.pack("<I", 4) + b"INFO" + b"id3 " + struct.pack("<I", 3) + b"abc"
    for padding in (b"", b"\0"):
        assert len(decode_audio(in_format("WAV") + notes + padding).samples) == len(TONE)
        with pytest.raises(FusionZooError, match="contains no audio"):
            decode_audio(in_format("WAV", TONE[:0]) + notes + padding)
    assert not caplog.records


def test_bytes_that_a_header_leaves_out_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("WAV", "AU", "RF64"):
        path = tmp_path / kind
        path.write_bytes(announcing(8000, kind))
        assert len(decode_audio(path).samples) == 4000
        reason = "bytes behind its samples are left out by its header, and not read"
        assert caplog.records[-1].getMessage() == f"{path}: {reason}"


MP3 = in_format("MP3")
MP3_TAG = b"ID3\4\0\0\0\0\2\0" + bytes(256)  # 2 * 128 bytes, 7 bits of each byte


@pytest.mark.parametrize("data", [MP3 + bytes(500), MP3 + MP3, MP3_TAG + MP3 + MP3])
def test_an_mp3_of_another_length_is_named_and_the_library_prints_nothing(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for whole in (MP3, MP3_TAG + MP3):
        assert len(decode_audio(whole).samples) >= len(TONE)
    assert not caplog.records
    path = tmp_path / "joined.mp3"
    path.write_bytes(data)
    assert torch.equal(decode_audio(path).samples, decode_audio(MP3).samples)
    (record,) = caplog.records
    reason = "its header announces another number of bytes than it holds"
    assert record.getMessage() == f"{path}: {reason}"
    assert capfd.readouterr().err == ""


# ---- formats that cannot seek


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        ("WAV", "GSM610"),
        ("WAV", "NMS_ADPCM_24"),
        ("WAV", "G721_32"),
        ("AIFF", "GSM610"),
        ("W64", "GSM610"),
        ("AU", "G723_24"),
    ],
)
def test_a_part_is_read_of_formats_that_cannot_seek(
    kind: str, subtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "call"
    tone = 0.3 * np.sin(np.arange(500_000) / 10)
    soundfile.write(path, tone, 8000, format=kind, subtype=subtype)
    with soundfile.SoundFile(path) as file:
        whole = torch.from_numpy(file.read(file.frames, dtype="float32"))
    for source in (path, path.read_bytes()):
        clip = decode_audio(source)
        assert torch.equal(clip.samples, whole)
        assert isinstance(clip, AudioFile)
        assert torch.equal(clip.read(300_000, 100), whole[300_000:300_100])
        part = decode_audio(Segment(source, 1.0, 2.0))
        assert torch.equal(part.samples, whole[8000:16_000])
