"""Time the window of a long clip against a bare seek-and-read, and against decoding all of it.

`python perf/sound.py`. CPU time, one thread: a 180 s stereo FLAC of 44.1 kHz, of which 4 s are
used. `of_bare` is decoding and preparing them over a bare loop: open with soundfile, seek, read,
(a + b) / 2, resample; `of_bare_44100` leaves out resampling on both sides. Bar: at most 1.3, the
median of pairs. `ratio` is against what the loader did at first: the whole file, numpy's mean,
torchaudio's resampler with its filter kept, a cut. Then the averaging of 5 s of two channels.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch
from torchaudio.transforms import Resample

from fusionzoo.datasets.media import decode_audio
from fusionzoo.encoders._wave import WaveProcessor

RATE, TARGET, SECONDS, WINDOW = 44_100, 16_000, 180, 4.0


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time of `work` after one call to warm up."""
    work()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times)


def pairs(ours: Callable[[], object], bare: Callable[[], object], rounds: int = 41) -> float:
    """Return the median ratio of CPU times, measured in turns, as other programs disturb both."""
    ours(), bare()
    ratios = []
    for _ in range(rounds):
        start = time.process_time()
        ours()
        middle = time.process_time()
        bare()
        ratios.append((middle - start) / (time.process_time() - middle))
    return statistics.median(ratios)


def main() -> None:
    """Print one JSON line."""
    torch.set_num_threads(1)
    resample, prepare = Resample(RATE, TARGET), WaveProcessor(TARGET, WINDOW)
    stereo = 0.1 * np.random.default_rng(0).standard_normal((SECONDS * RATE, 2)).astype(np.float32)
    few = stereo[: 5 * RATE]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.flac"
        soundfile.write(path, stereo, RATE)

        def whole() -> torch.Tensor:
            samples = soundfile.read(path, dtype="float32", always_2d=True)[0].mean(1)
            wave = resample(torch.from_numpy(samples))
            start = (len(wave) - round(WINDOW * TARGET)) // 2
            return wave[start : start + round(WINDOW * TARGET)]

        def window() -> torch.Tensor:
            return prepare(decode_audio(path))["wave"]

        plain = WaveProcessor(RATE, WINDOW)
        middle, count = round((SECONDS - WINDOW) / 2 * RATE), round(WINDOW * RATE)

        def seek_and_read() -> torch.Tensor:
            with soundfile.SoundFile(path) as file:
                file.seek(middle)
                block = file.read(count, dtype="float32", always_2d=True)
            return torch.from_numpy((block[:, 0] + block[:, 1]) / 2)

        figures = {
            "of_bare": pairs(window, lambda: resample(seek_and_read())),
            "of_bare_44100": pairs(lambda: plain(decode_audio(path)), seek_and_read),
            "whole_ms": cpu_ms(whole, 5),
            "window_ms": cpu_ms(window, 21),
            "mean_ms": cpu_ms(lambda: few.mean(1), 21),
            "average_ms": cpu_ms(lambda: (few[:, 0] + few[:, 1]) / 2, 21),
            "largest_difference": (whole() - window() / 32767).abs().max().item(),
        }
    figures["ratio"] = figures["whole_ms"] / figures["window_ms"]
    print(json.dumps({"benchmark": "sound", **{k: round(v, 5) for k, v in figures.items()}}))


if __name__ == "__main__":
    main()
