"""Samples of a data set as files that other programs read."""

from __future__ import annotations

from pathlib import Path

import fusionzoo as fz
from fusionzoo.ground.resampling import resampler
from fusionzoo.structures import Sample


def raw_files(dataset: fz.PairedDataset, folder: Path, rows: int) -> list[dict[str, str]]:
    """Write samples as files: pictures of odd sizes, sounds at 44.1 kHz."""
    import soundfile
    from PIL import Image

    raw = []
    for row in range(0, len(dataset), max(1, len(dataset) // rows)):
        values: dict[str, str] = {}
        sample = dataset[row]
        assert isinstance(sample, Sample)
        for name, value in sample.values.items():
            kind = dataset.modalities[name]
            if value is None:
                continue
            path = folder / f"{row}_{name}"
            if kind == "image":
                picture = Image.fromarray(value.permute(1, 2, 0).numpy())
                width, height = max(40, picture.width) + row % 7, max(30, picture.height) + row % 5
                picture.resize((width, height)).save(f"{path}.png")
                values[name] = f"{path}.png"
            elif kind == "audio":
                wave = resampler(value.rate, 44_100)(value.samples)
                soundfile.write(f"{path}.wav", wave.numpy(), 44_100)
                values[name] = f"{path}.wav"
            else:
                values[name] = str(value)
        raw.append(values)
    return raw[:rows]
