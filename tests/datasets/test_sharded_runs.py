"""train.py on shards, in processes of its own: killed by signal 9, and as two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo as fz
from fusionzoo.datasets.shards import blocks
from fusionzoo.scripts.train import main as train
from fusionzoo.training.trainer import Trainer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS, EPOCH, CUT = 36, 12, 19  # of a run; of an epoch; the step at which a run is killed
# Loaded by train.py: small windows, the contents of every batch in a file, and a kill -9.
PLUGIN = """
import hashlib, json, os, signal
from fusionzoo.datasets.shards import blocks
from fusionzoo.training.trainer import Trainer

blocks.MAX_WINDOW = 3
step_of_trainer = Trainer.step

def contents(batch):
    for row, key in enumerate(batch.ids):
        digest = hashlib.md5()
        for name in sorted(batch.inputs):
            for part in sorted(batch.inputs[name]):
                digest.update(batch.inputs[name][part][row].numpy().tobytes())
        yield f"{key} {digest.hexdigest()}"

def step(trainer, batches, context, **settings):
    if context.step == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    line = json.dumps([context.step, [x for batch in batches for x in contents(batch)]])
    with open(f"{os.environ['RECORDS']}-{trainer.world.rank}.jsonl", "a") as file:
        file.write(line + "\\n")
    return step_of_trainer(trainer, batches, context, **settings)

Trainer.step = step
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    for format in ("parquet", "webdataset"):
        fz.convert("interactions", root / format, format=format, block_mb=0.001, samples=300)
        blocking = fz.create_dataset(root / format).split("train").blocking()
        assert blocking is not None and len(blocking.blocks.unique()) > 6
    return {format: root / format for format in ("parquet", "webdataset")}


class Runner:
    """Runs train.py on shards; each run writes into `folder / name`."""

    def __init__(self, shards: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shards, self.folder, self.monkeypatch = shards, folder, monkeypatch
        (folder / "watch.py").write_text(PLUGIN)

    def words(self, name: str, workers: int, ranks: int = 1) -> list[str]:
        words = ["--data.name", "manifest", "--data.root", str(self.shards), "--log", "none"]
        words += ["--train.epochs", "3", "--train.save_every", "5", "--resume", "auto"]
        words += ["--train.batch_size", str(16 // ranks), "--train.num_workers", str(workers)]
        words += ["--plugins", str(self.folder / "watch.py")]
        return [*words, "--out", str(self.folder / name)]

    def environment(self, name: str, kill_at: int) -> dict[str, str]:
        return {"KILL_AT": str(kill_at), "RECORDS": str(self.folder / f"{name}-records")}

    def here(self, name: str, workers: int) -> None:
        """Run, or resume, in this process, which saves the start of another."""
        with self.monkeypatch.context() as patch:
            for key, value in self.environment(name, -1).items():
                patch.setenv(key, value)
            assert train(self.words(name, workers)) == 0

    def start(self, name: str, *, workers: int, ranks: int = 1, kill_at: int = -1) -> list[int]:
        """Run, or resume, as processes to the end or to the step at which each kills itself.

        Returns their exit codes.
        """
        meet = self.folder / f"meet-{name}-{kill_at}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment(name, kill_at)}
        processes = []
        for rank in range(ranks):
            words = [sys.executable, "train.py", *self.words(name, workers, ranks)]
            if ranks > 1:
                words += ["--dist.init_method", f"file://{meet}", "--dist.rank", str(rank)]
                words += ["--dist.world_size", str(ranks), "--dist.timeout", "60"]
            processes.append(subprocess.Popen(words, cwd=ROOT, env=env))
        return [process.wait(timeout=300) for process in processes]

    def records(self, name: str, rank: int = 0) -> list[list[str]]:
        """Return the contents of the batch of each step; steps made again read the same."""
        batches: dict[int, list[str]] = {}
        path = self.folder / f"{name}-records-{rank}.jsonl"
        for line in path.read_text().splitlines():
            step, contents = json.loads(line)
            assert batches.setdefault(step, contents) == contents, step
        assert sorted(batches) == list(range(len(batches)))
        return [batches[step] for step in sorted(batches)]

    def outcome(self, name: str) -> tuple[dict[str, torch.Tensor], str, Any]:
        """Return weights, log and results of a finished run."""
        out = self.folder / name
        state = torch.load(out / "checkpoints" / "last.pt", weights_only=True)
        results = json.loads((out / "metrics.json").read_text())
        parts = {part: results[part] for part in ("train", "val", "test", "unimodal")}
        return state["objective"], (out / "metrics.jsonl").read_text(), parts

    def assert_same(self, name: str, other: str) -> None:
        (weights, *rest), (other_weights, *other_rest) = self.outcome(name), self.outcome(other)
        assert weights.keys() == other_weights.keys() and rest == other_rest
        for key, tensor in weights.items():
            assert torch.equal(tensor, other_weights[key]), key


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undo at the end of a test what the plugin does to this process."""
    monkeypatch.setattr(Trainer, "step", Trainer.step)
    monkeypatch.setattr(blocks, "MAX_WINDOW", blocks.MAX_WINDOW)
    return monkeypatch


@pytest.mark.parametrize(("format", "workers"), [("parquet", 1), ("webdataset", 0)])
def test_a_run_on_shards_that_was_killed_in_mid_epoch_resumes_bit_for_bit(
    format: str, workers: int, shards: dict[str, Path], patched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Runner(shards[format], tmp_path, patched)
    run.here("whole", workers=1 - workers)
    assert run.start("cut", workers=workers, kill_at=CUT) == [-signal.SIGKILL]
    assert CUT % EPOCH and not (tmp_path / "cut" / "metrics.json").exists()
    assert len(run.records("cut")) == CUT
    run.here("cut", workers=workers)
    batches = run.records("whole")
    assert len(batches) == STEPS and batches[:EPOCH] != batches[EPOCH : 2 * EPOCH]
    assert run.records("cut") == batches
    lines = (tmp_path / "cut-records-0.jsonl").read_text().count("\n")
    assert STEPS < lines < STEPS + CUT  # resumed from a checkpoint, not from the start
    run.assert_same("whole", "cut")


def test_two_ranks_on_shards_read_the_batches_of_one_and_resume_bit_for_bit(
    shards: dict[str, Path], patched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Runner(shards["parquet"], tmp_path, patched)
    run.here("alone", workers=0)
    assert run.start("whole", workers=0, ranks=2) == [0, 0]
    assert -signal.SIGKILL in run.start("cut", workers=1, ranks=2, kill_at=CUT)
    assert not (tmp_path / "cut" / "metrics.json").exists()
    assert [len(run.records("cut", rank)) for rank in (0, 1)] == [CUT, CUT]
    assert run.start("cut", workers=1, ranks=2) == [0, 0]
    batches = run.records("alone")
    assert len(batches) == STEPS and all(batches)
    for name in ("whole", "cut"):
        for rank in (0, 1):
            assert run.records(name, rank) == [batch[rank::2] for batch in batches], (name, rank)
    run.assert_same("whole", "cut")
