"""Too many values that cannot be used end a run with one error; a few are counted and named."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import fusionzoo as fz
from fusionzoo.datasets import Collate, PairedDataset, create_dataset
from fusionzoo.datasets.failures import Failures
from fusionzoo.datasets.loader import make_loader
from fusionzoo.encoders.base import Item, Processor
from fusionzoo.errors import FusionZooError
from fusionzoo.scripts import benchmark, embed, train

TINY = ["--encoders.image.name", "timm/resnet10t", "--encoders.image.pretrained", "false"]
TINY += ["--encoders.image.size", "32", "--encoders.text.name", "chars"]


class Pixel(Processor):
    """The first pixel; an image whose first pixel is 7 is refused."""

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        if int(value[0, 0, 0]) == 7:
            raise FusionZooError("sevens are not accepted")
        return {"pixels": value[:, 0, 0]}

    def blank(self) -> Item:
        return {"pixels": torch.zeros(3, dtype=torch.uint8)}


def manifest(folder: Path, rows: int = 40, missing: Any = range(0), sevens: Any = ()) -> str:
    """Write images and texts, but for the rows in `missing`."""
    lines = ["id,split,target,image,text"]
    for row in range(rows):
        split = ("train", "train", "val", "test")[row // 2 % 4]
        lines.append(f"s{row},{split},{'ab'[row % 2]},{row}.png,word {row}")
        if row not in missing:
            red = 7 if row in sevens else 90
            Image.new("RGB", (8, 8), (red, 2, 3)).save(folder / f"{row}.png")
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "data.csv")


def opened(folder: Path, on_error: str, **settings: Any) -> PairedDataset:
    data = create_dataset("manifest", root=manifest(folder, **settings), on_error=on_error)
    return data.select("image")


def read_all(data: PairedDataset, workers: int = 0, size: int = 5) -> list[Any]:
    batches = [list(range(len(data)))[row : row + size] for row in range(0, len(data), size)]
    return list(make_loader(data, batches, Collate({"image": Pixel()}), num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["missing", "skip"])
def test_files_that_are_all_missing_end_with_one_error_that_names_the_first_five(
    on_error: str, workers: int, tmp_path: Path
) -> None:
    data = opened(tmp_path, on_error, missing=range(40))
    with pytest.raises(FusionZooError) as caught:
        read_all(data, workers)
    message = str(caught.value)
    assert "\n" not in message
    assert "values of image tried so far cannot be used" in message
    assert "--data.max_errors 0.05" in message
    assert message.count("(image): ") == 5
    assert message.count(".png cannot be opened: No such file") == 5
    assert active_children() == []  # torch's loader leaves workers to the garbage collector


@pytest.mark.parametrize(("missing", "ends"), [(range(0, 200, 50), False), (range(50), True)])
def test_a_few_missing_files_are_counted_and_many_end_the_run(
    missing: Any, ends: bool, tmp_path: Path
) -> None:
    data = opened(tmp_path, "missing", rows=200, missing=missing)
    if ends:
        with pytest.raises(FusionZooError, match=r"20 of 20 values"):
            read_all(data)
        return
    read_all(data)
    read_all(data)  # what is met again counts once
    assert data.failures() == [(f"s{row}", "image") for row in missing]


def test_the_share_may_be_set_and_one_never_ends_a_run(tmp_path: Path) -> None:
    root = manifest(tmp_path, missing=range(40))
    data = create_dataset("manifest", root=root, on_error="missing", max_errors=1.0)
    assert len(read_all(data.select("image"))) == 8
    with pytest.raises(FusionZooError, match=r"max_errors=1\.5; it is a share"):
        create_dataset("manifest", root=root, max_errors=1.5)


def test_of_few_values_all_must_fail(tmp_path: Path) -> None:
    some = opened(tmp_path, "missing", rows=8, missing=range(6))
    assert len(read_all(some)) == 2
    (tmp_path / "6.png").unlink()
    (tmp_path / "7.png").unlink()
    with pytest.raises(FusionZooError, match="8 of 8 values of image"):
        read_all(opened(tmp_path, "missing", rows=8, missing=range(8)))


def test_failures_may_be_listed_while_another_process_notes_more() -> None:
    failures = Failures(20_000, 2)

    def note() -> None:
        for row in range(20_000):
            failures.note_failed(row, row % 2, "")

    other = threading.Thread(target=note)  # it writes into the same memory as a loader's worker
    other.start()
    listed = [len(failures.cells())]
    while other.is_alive():
        listed.append(len(failures.cells()))
    assert listed == sorted(listed)
    assert failures.cells() == [(row, row % 2) for row in range(20_000)]


def test_chance_does_not_end_a_run_whose_share_is_below_the_limit() -> None:
    draw = torch.Generator().manual_seed(0)
    ended = 0
    for _ in range(100):
        failures = Failures(1000, 1)
        fails = torch.rand(1000, generator=draw) < 0.03
        for row in range(1000):
            if fails[row]:
                failures.note_failed(row, 0, "")
                if failures.too_many(0, 0.05, 1000):
                    ended += 1
                    break
            else:
                failures.note_tried(row, 0)
    assert ended <= 5  # half of them without the allowance


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_processor_refuses_follows_on_error_and_is_counted(
    workers: int, tmp_path: Path
) -> None:
    (batch,) = read_all(opened(tmp_path, "missing", sevens=[3]), workers, 40)
    assert len(batch.ids) == 40
    assert batch.present[:, 0].tolist() == [row != 3 for row in range(40)]
    assert batch.inputs["image"]["pixels"][3].tolist() == [0, 0, 0]
    data = opened(tmp_path, "skip", sevens=[3])
    (batch,) = read_all(data, workers, 40)
    assert batch.ids == [f"s{row}" for row in range(40) if row != 3]
    assert len(batch.inputs["image"]["pixels"]) == 39
    assert data.failures() == [("s3", "image")]
    with pytest.raises(FusionZooError) as caught:
        read_all(opened(tmp_path, "raise", sevens=[3]), workers)
    assert str(caught.value).endswith(
        "data.csv, row 5, sample 's3', image: sevens are not accepted"
    )
    assert "\n" not in str(caught.value)


def test_a_processor_that_refuses_everything_ends_the_run(tmp_path: Path) -> None:
    data = opened(tmp_path, "missing", sevens=range(40))
    with pytest.raises(FusionZooError, match=r"'s0' \(image\): sevens are not accepted; 's1'"):
        read_all(data)


@pytest.mark.parametrize("script", ["train", "embed", "benchmark"])
def test_each_script_ends_early_with_exit_code_2(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    args = ["--data.name", "manifest", "--data.root", manifest(tmp_path, 64, range(64))]
    args += ["--data.on_error", "missing"]
    if script == "train":
        args += [*TINY, "--log", "none", "--train.num_workers", "1", "--out", str(tmp_path / "run")]
        code = train.main([*args, "--train.epochs", "1"])
    elif script == "embed":
        encoders = {"image": {"name": "timm/resnet10t", "pretrained": False, "size": 32}}
        model = fz.create_model("concat", {**encoders, "text": "chars"}, classes=["a", "b"])
        folder = str(model.save(tmp_path / "model"))
        code = embed.main([*args, "--model", folder, "--out", str(tmp_path / "x.parquet")])
    else:
        args += [*TINY, "--fusions", "concat", "--seeds", "1", "--jobs", "1"]
        code = benchmark.main([*args, "--out", str(tmp_path / "report")])
    error = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert code == 2
    assert len(error) == 1
    assert "values of image tried so far cannot be used" in error[0]
    assert error[0].count("(image): ") == 5


@pytest.mark.slow
def test_several_processes_end_early_too(tmp_path: Path) -> None:
    args = ["--data.name", "manifest", "--data.root", manifest(tmp_path, 160, range(160))]
    args += ["--data.on_error", "missing", *TINY, "--log", "none", "--dist.nproc", "2"]
    args += ["--train.epochs", "1", "--out", str(tmp_path / "run")]
    script = Path(train.__file__)
    done = subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "values of image tried so far cannot be used" in done.stderr
