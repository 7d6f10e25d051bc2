"""Videos: images at uniformly spaced times and the sound, equal to folders of frames and WAV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo.datasets import Collate
from fusionzoo.datasets.media.audio import Segment
from fusionzoo.datasets.media.decode import decode
from fusionzoo.datasets.summary import data_summary
from fusionzoo.encoders.audio import WaveProcessor
from fusionzoo.encoders.image import ImageProcessor, Preparation
from fusionzoo.errors import FusionZooError

av = pytest.importorskip("av")
pytestmark = pytest.mark.needs("av")

SIDE, FPS, SECONDS, RATE = 32, 10, 2, 8000
LABELS = ("across low", "across high", "down low", "down high")


# ---- a miniature audio-visual data set: the label is the direction of motion and the tone


def make_clip(label: str, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return frames, uint8 (20, 32, 32, 3), and int16 samples, (16000,)."""
    direction, tone = label.split()
    frames = draw.integers(0, 60, (FPS * SECONDS, SIDE, SIDE, 3), dtype=np.uint8)
    offset, sign = int(draw.integers(10, 16)), draw.choice((-1, 1))
    for number, frame in enumerate(frames[::sign]):
        place = number * (SIDE - 6) // len(frames)
        view = frame if direction == "across" else frame.swapaxes(0, 1)
        view[offset : offset + 6, place : place + 6] = 255
    pitch = draw.uniform(300, 500) if tone == "low" else draw.uniform(900, 1400)
    times = np.arange(RATE * SECONDS) / RATE
    wave = np.sin(2 * np.pi * pitch * times + draw.uniform(0, 6)) + draw.normal(0, 0.5, len(times))
    return frames, (wave * 6000).astype(np.int16)


def write_video(path: Path, frames: np.ndarray, wave: np.ndarray | None) -> None:
    """Write a lossless MOV: PNG images and, unless `wave` is None, PCM sound."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = (*frames.shape[1:3], "rgb24")
        sound = wave is not None and container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if wave is not None:
            block = av.AudioFrame.from_ndarray(wave[None], format="s16", layout="mono")
            block.rate, block.pts = RATE, 0
            container.mux(sound.encode(block))
            container.mux(sound.encode())


def write_frames(folder: Path, frames: np.ndarray, wave: np.ndarray) -> None:
    folder.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{number}.png")
    soundfile.write(folder / "sound.wav", wave, RATE)


def write_set(root: Path, samples: int, *, as_video: bool = True) -> list[dict[str, Any]]:
    """Write clips with sound; return their rows. The text tells the motion in 6 of 10 samples."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(samples):
        label = LABELS[number % 4]
        frames, wave = make_clip(label, draw)
        motion = draw.choice(["across", "down"]) if draw.random() < 0.8 else label.split()[0]
        files = {"image": f"{root}/{number}/*.png", "audio": f"{root}/{number}/sound.wav"}
        if as_video:
            write_video(root / f"{number}.mov", frames, wave)
            files = dict.fromkeys(files, f"{root}/{number}.mov")
        else:
            write_frames(root / str(number), frames, wave)
        split = ("train", "train", "train", "val", "test")[number // 4 % 5]
        rows.append({"id": str(number), "split": split, "target": label, **files, "text": motion})
    return rows


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A video of 2 s with its frames and samples."""
    path = tmp_path_factory.mktemp("video") / "clip.mov"
    frames, wave = make_clip("across low", np.random.default_rng(1))
    write_video(path, frames, wave)
    return path, frames, wave


def tensors(frames: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(frame).permute(2, 0, 1) for frame in frames]


def assert_pictures(value: Any, frames: np.ndarray) -> None:
    assert len(value) == len(frames)
    for picture, expected in zip(value, tensors(frames), strict=True):
        assert torch.equal(picture, expected)


def test_video_files_and_folders_of_frames_give_the_same_tensors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    videos = fz.create_dataset(write_set(tmp_path / "a", 4), frames=6)
    folders = fz.create_dataset(write_set(tmp_path / "b", 4, as_video=False), frames=6)
    pictures = ImageProcessor(Preparation(size=(SIDE, SIDE)))
    collate = Collate({"image": pictures, "audio": WaveProcessor(RATE, 4.0)})
    batches = [collate([data[n] for n in range(4)]) for data in (videos, folders)]
    for name in ("image", "audio"):
        inputs, others = (batch.inputs[name] for batch in batches)
        assert inputs.keys() == others.keys()
        assert all(torch.equal(inputs[key], others[key]) for key in inputs)
    assert batches[0].inputs["image"]["item_counts"].tolist() == [6] * 4
    assert any("at most 6 of each" in line for line in data_summary(folders))


def test_pictures_stand_in_the_middles_of_equal_parts(clip: Any) -> None:
    path, frames, _ = clip
    assert_pictures(decode("image", path), frames[[1, 3, 6, 8, 11, 13, 16, 18]])
    assert_pictures(decode("image", Segment(path, frames=3)), frames[[3, 10, 16]])
    assert_pictures(decode("image", Segment(path, frames=50)), frames)  # each once
    assert torch.equal(decode("image", Segment(path, frames=1)), tensors(frames)[10])
    assert_pictures(decode("image", path.read_bytes()), frames[[1, 3, 6, 8, 11, 13, 16, 18]])


def test_the_sound_of_a_video_is_that_of_the_same_samples_in_a_wav(clip: Any) -> None:
    path, _, wave = clip
    sound = decode("audio", path)
    assert sound.rate == RATE
    assert torch.equal(sound.samples, decode("audio", (wave, RATE)).samples)
    part = decode("audio", Segment(path, 0.5, 1.25))
    assert torch.equal(part.samples, sound.samples[4000:10_000])


def test_a_segment_of_a_video_has_the_pictures_and_the_sound_of_that_time(clip: Any) -> None:
    path, frames, wave = clip
    rows = [
        {"image": str(path), "audio": str(path), "start": 0.5, "end": 1.5, "target": "a"},
        {"image": str(path), "audio": str(path), "start": None, "end": 1.0, "target": "a"},
    ]
    rows = [{"split": "train", **row} for row in rows]
    data = fz.create_dataset(rows, frames=5)
    first, second = data[0], data[1]
    assert_pictures(first.values["image"], frames[[6, 8, 10, 12, 14]])
    assert_pictures(second.values["image"], frames[[1, 3, 5, 7, 9]])
    samples = decode("audio", (wave, RATE)).samples
    assert torch.equal(first.values["audio"].samples, samples[4000:12_000])
    assert torch.equal(second.values["audio"].samples, samples[:8000])
    moved = [{**row, "audio_start": 1.0, "audio_end": 2.0} for row in rows]
    sample = fz.create_dataset(moved, frames=5)[0]
    assert torch.equal(sample.values["audio"].samples, samples[8000:16_000])
    assert_pictures(sample.values["image"], frames[[6, 8, 10, 12, 14]])


def test_far_parts_of_a_long_video_are_sought(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "long.mov"
    frames = np.zeros((FPS * 60, 16, 16, 3), np.uint8)
    frames += (np.arange(len(frames)) % 251).astype(np.uint8)[:, None, None, None]
    wave = np.random.default_rng(0).integers(-9000, 9000, RATE * 60).astype(np.int16)
    write_video(path, frames, wave)
    decoded = count_frames(monkeypatch)
    pictures = decode("image", Segment(path, 40.0, 44.0, 4))
    shades = [int(picture[0, 0, 0]) for picture in pictures]
    assert shades == [n % 251 for n in (405, 415, 425, 435)]
    assert len(decoded) < 60
    sound = decode("audio", path)  # 480,000 samples at once
    monkeypatch.setattr("fusionzoo.datasets.media.audio.MAX_READ_AT_ONCE", 10_000)
    lazy = decode("audio", path)
    assert lazy.frames == len(wave)
    decoded.clear()
    assert torch.equal(lazy.read(30 * RATE, RATE), sound.samples[30 * RATE : 31 * RATE])
    assert sum(frame.samples for frame in decoded) < 3 * RATE
    window = WaveProcessor(RATE, 1.0)(lazy)["wave"]
    assert torch.equal(window, WaveProcessor(RATE, 1.0)(sound)["wave"])


def count_frames(monkeypatch: Any) -> list[Any]:
    """Return a list that receives every frame that a video decodes."""
    decoded: list[Any] = []

    class Counted:
        def __init__(self, container: Any) -> None:
            self.container = container

        def __getattr__(self, name: str) -> Any:
            return getattr(self.container, name)

        def decode(self, stream: Any) -> Iterator[Any]:
            for frame in self.container.decode(stream):
                decoded.append(frame)
                yield frame

    from contextlib import contextmanager

    from fusionzoo.datasets.media import video

    original = video._open

    @contextmanager
    def opened(source: Any) -> Iterator[Any]:
        with original(source) as container:
            yield Counted(container)

    monkeypatch.setattr(video, "_open", opened)
    return decoded


def test_a_video_without_sound_or_pictures_is_one_clear_error(tmp_path: Path, clip: Any) -> None:
    write_video(tmp_path / "mute.mov", clip[1], None)
    with pytest.raises(FusionZooError, match=r"mute\.mov has no audio: leave its cell empty"):
        decode("audio", tmp_path / "mute.mov")
    assert len(decode("image", tmp_path / "mute.mov")) == 8
    with av.open(str(tmp_path / "sound.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(clip[2][None], format="s16", layout="mono")
        frame.rate = RATE
        container.mux(stream.encode(frame))
    with pytest.raises(FusionZooError, match=r"sound\.mkv has no frames"):
        decode("image", tmp_path / "sound.mkv")


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"#EXTM3U\n/etc/passwd\n", "is no video that is read"),
        (b"", "is no video that is read"),
        (b"\0\0\0\x18ftypisom" + bytes(200), "cannot be read as a video|has no"),
        (b"\x1a\x45\xdf\xa3" + bytes(200), "cannot be read as a video"),
    ],
)
def test_what_is_no_video_is_refused_and_no_playlist_is_followed(
    contents: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a.mp4").write_bytes(contents)
    for kind in ("image", "audio"):
        with pytest.raises(FusionZooError, match=reason) as caught:
            decode(kind, tmp_path / "a.mp4")
        assert "\n" not in str(caught.value) and "a.mp4" in str(caught.value)


def test_a_video_that_was_cut_off_is_noticed(tmp_path: Path, clip: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (FPS * 6, 16, 16, 3), dtype=np.uint8)
    path = tmp_path / "whole.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    assert len(decode("image", path)) == 8
    contents = path.read_bytes()
    (tmp_path / "cut.mkv").write_bytes(contents[: len(contents) // 2])
    with pytest.raises(FusionZooError, match=r"cut\.mkv .*(cut off|cannot be read)"):
        decode("image", tmp_path / "cut.mkv")


def test_budgets_hold_for_videos_before_pictures_are_decoded(clip: Any, monkeypatch: Any) -> None:
    decoded = count_frames(monkeypatch)
    with pytest.raises(FusionZooError, match=r"too large: 1,001 items; .*--data.frames"):
        decode("image", Segment(clip[0], frames=1001))
    from fusionzoo.datasets.media import budgets

    for budget in ("pixels", "pixels of all images", "video file", "rate"):
        small = {budget: budgets.Budget(limit=10, unit="units", advice="less")}
        monkeypatch.setattr(budgets, "BUDGETS", {**budgets.BUDGETS, **small})
        with pytest.raises(FusionZooError, match="too large"):
            decode("audio" if budget == "rate" else "image", clip[0])
        monkeypatch.undo()
        decoded = count_frames(monkeypatch)
    assert not decoded


def test_a_rotated_video_stands_upright(clip: Any, monkeypatch: Any) -> None:
    path, frames, _ = clip

    class Rotated:
        def __init__(self, frame: Any) -> None:
            self.frame, self.rotation = frame, 90

        def __getattr__(self, name: str) -> Any:
            return getattr(self.frame, name)

    from fusionzoo.datasets.media import video

    original = video._tensor
    monkeypatch.setattr(video, "_tensor", lambda frame, name: original(Rotated(frame), name))
    upright = np.rot90(frames[[5, 15]], 1, (1, 2)).copy()
    assert_pictures(decode("image", Segment(path, frames=2)), upright)


# ---- training

VIT = {"img_size": SIDE, "patch_size": 16, "depth": 1, "embed_dim": 32, "num_heads": 4}
ENCODERS: dict[str, Any] = {
    "image": {"name": "timm/vit_tiny_patch16_224", "pretrained": False, **VIT},
    "audio": {"name": "mel/stats", "rate": RATE, "num_mels": 16},
    "text": {"name": "chars", "dim": 32, "num_layers": 1},
}


@pytest.mark.nightly
def test_frames_sound_and_text_fused_beat_each_of_them_alone(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    data = fz.create_dataset(write_set(tmp_path / "clips", 200), frames=6)
    run = fz.train(
        data,
        fusion={"name": "mbt", "dim": 32},
        encoders=ENCODERS,
        out=tmp_path / "run",
        epochs=12,
        batch_size=16,
        num_workers=0,
        log="none",
        optim={"lr": 3e-3},
    )
    metrics = fz.evaluate(run, data, every_subset=True, num_workers=0)
    subsets = {name: x["accuracy"] for name, x in metrics["subsets"].items()}
    assert len(subsets) == 6
    best = max(subsets[name] for name in ("image", "text", "audio"))
    assert metrics["accuracy"] >= best + 0.1, subsets
