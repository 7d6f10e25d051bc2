"""What docs/faq.md and SKILL.md tell to run does run, block by block in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/faq.md", "SKILL.md")
PACKAGES = {"lancedb": "import lancedb", "av": ".mp4"}  # what a block that needs one contains


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the code of each block of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```(bash|python)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def needed(code: str) -> set[str]:
    return {package for package, sign in PACKAGES.items() if sign in code}


def run(language: str, code: str, folder: Path) -> None:
    """Run a block, which must succeed, with the commands of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    start = [sys.executable, "-P", "-c"] if language == "python" else ["bash", "-ec"]
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*start, code], cwd=folder, env=env, capture_output=True, check=False)
    assert done.returncode == 0, f"{code}\n{done.stdout.decode()}{done.stderr.decode()}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(page: str, tmp_path: Path) -> None:
    for language, code in blocks(page):
        if not needed(code):
            run(language, code, tmp_path)


@pytest.mark.slow
@pytest.mark.needs("lancedb", extra="loops")
def test_a_vector_database_reads_embeddings(tmp_path: Path) -> None:
    embed = "fusionzoo train --data.samples 60 --train.epochs 1 --out a\n"
    run("bash", f"{embed}fusionzoo embed a --out emb.parquet", tmp_path)
    [(language, code)] = [x for x in blocks("docs/faq.md") if needed(x[1]) == {"lancedb"}]
    run(language, code, tmp_path)


@pytest.mark.slow
@pytest.mark.needs("av")
def test_a_model_learns_from_videos(tmp_path: Path) -> None:
    import av
    import numpy as np

    for number in range(20):
        with av.open(str(tmp_path / f"{number}.mp4"), "w") as container:
            film = container.add_stream("mpeg4", rate=8)
            film.height, film.width, film.pix_fmt = 32, 32, "yuv420p"
            sound = container.add_stream("aac", rate=8000, layout="mono")
            for shade in range(8):
                picture = np.full((32, 32, 3), 30 * shade, np.uint8)
                container.mux(film.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            wave = np.sin(np.arange(8000, dtype=np.float32) * (0.1 + number % 2))[None]
            block = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
            block.rate, block.pts = 8000, 0
            container.mux([*film.encode(), *sound.encode(block), *sound.encode()])
    [(language, code)] = [x for x in blocks("docs/faq.md") if needed(x[1]) == {"av"}]
    run(language, code, tmp_path)
