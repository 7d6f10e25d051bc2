"""Time the window of a long clip, read by seeking, against decoding and resampling all of it.

`python perf/sound.py`. CPU time, one thread: a 180 s stereo FLAC of 44.1 kHz, of which 4 s at
16 kHz are used; then the averaging of 5 s of two channels. The bare side is what the loader did
before: soundfile, numpy's mean, torchaudio's resampler with its filter kept, a cut.
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

        figures = {
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
