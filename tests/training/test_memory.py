"""What training holds in memory: no more rows, graph or freed blocks than it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.encoders import create_encoder
from fusionzoo.machine.memory import Heap

ROOT = Path(__file__).parents[2]
SMALL = {"pretrained": False, "size": 32}


def pixels(rows: int, side: int = 32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shape = (rows, 3, side, side)
    return {"pixels": torch.randint(256, shape, generator=draw, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("freeze", "side", "sizes"),
    [("all", 256, [8, 1]), ("all", 160, [16, 3]), ("all", 32, [37]), ("none", 32, [400])],
)
def test_a_frozen_encoder_sees_few_pictures_at_once_unless_small_and_says_the_same(
    freeze: str, side: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"pretrained": False, "size": side, "freeze": freeze}
    encoder = create_encoder("image", "timm/resnet10t", **settings).eval()
    inputs = pixels(sum(sizes), side)
    whole = encoder.encode(inputs)
    rows, encode = [], encoder.encode

    def counted(inputs: dict[str, torch.Tensor]) -> Any:
        rows.append(len(inputs["pixels"]))
        return encode(inputs)

    monkeypatch.setattr(encoder, "encode", counted)
    parts = encoder(inputs)
    assert rows == sizes
    for tensor, wanted in zip(parts, whole, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)
    assert parts.tokens.requires_grad == (freeze == "none")


def test_memory_that_grows_is_given_back_and_what_a_batch_needs_is_kept() -> None:
    mib = 2**20
    # Resident before each batch's end; after a trim 1000 MiB are left.
    ends, trims = iter([1400, 1500, 1520, 1532, 1533, 1500, 1532]), []
    heap = Heap()
    heap._known, state = True, {"resident": 0}

    def release() -> None:
        trims.append(True)
        state["resident"] = 1000 * mib

    heap.resident = lambda: state["resident"]  # type: ignore[method-assign]
    heap.release = release  # type: ignore[method-assign]
    counts = []
    for end in ends:
        state["resident"] = end * mib
        heap.after_batch()
        counts.append(len(trims))
    # The first sets the floor, the second adds 500: 500 + 32 are allowed.
    assert counts == [1, 1, 1, 1, 2, 2, 2]
    heap, trims = Heap(), []
    heap.release = lambda: trims.append(True)  # type: ignore[method-assign]
    for resident, count in ((1000, 1), (1030, 1), (1033, 2), (1040, 2)):
        heap.resident = lambda resident=resident: resident * mib  # type: ignore[method-assign, misc]
        heap.trim()
        assert len(trims) == count


@pytest.mark.nightly
def test_the_recipe_of_the_stamps_trains_in_2_gb(
    tmp_path: Path, real_stamps: Path, record_property: Callable[[str, object], None]
) -> None:
    """It was 1.87 GB when measured, and 4.0 GB before freed memory was given back."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"  # from KiB
    )
    training = [sys.executable, "-m", "fusionzoo", "train", "--config", "configs/stamps.yaml"]
    training += ["--data.root", str(real_stamps)]
    training += ["--train.epochs", "1", "--log", "none", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *training]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    record_property("peak_resident_bytes", int(done.stdout))
    assert int(done.stdout) < 2.0e9
