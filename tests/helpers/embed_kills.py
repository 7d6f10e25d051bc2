"""Kill an extraction at random moments and compare its file with that of an uninterrupted one.

`python tests/helpers/embed_kills.py --kills 10 --rows 20000 --ranks 1`, or `--ranks 2`: one of two
processes is killed each time, and the other is stopped, as torchrun would. The same command goes
on, and at the end all bytes of the two files must be equal. Processes are forked, so that what is
killed is extraction and not the import of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from fusionzoo import create_model
from fusionzoo.scripts.embed import main as embed

WORDS = ("red", "green", "bird", "house", "a", "the", "large", "small", "on", "under")
CHARS = {"name": "chars", "dim": 16, "num_layers": 1, "num_heads": 2}


def write_table(path: Path, rows: int) -> None:
    """Write texts of very different lengths."""
    draw = random.Random(0)
    with path.open("w") as file:
        file.write("id,target,text\n")
        for row in range(rows):
            text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 20)))
            file.write(f"r{row},{'ab'[row % 2]},{row} {text}\n")


def rank(number: int, size: int, meeting: Path, args: list[str]) -> None:
    """Run one process of an extraction; its output is dropped."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_RANK": str(number)}
        args = [*args, "--dist.init_method", f"file://{meeting}"]
    with (meeting.parent / f"log-{number}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os._exit(embed(args))


def start(size: int, meeting: Path, args: list[str]) -> list[multiprocessing.Process]:
    """Start all processes of an extraction."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(n, size, meeting, args)) for n in range(size)]
    for process in ranks:
        process.start()
    return ranks  # type: ignore[return-value]


def finish(ranks: list[multiprocessing.Process], folder: Path) -> None:
    """Wait for all processes, which must succeed; one that does not is quoted."""
    for number, process in enumerate(ranks):
        process.join()
        if process.exitcode:
            log = (folder / f"log-{number}").read_text(errors="replace")
            raise SystemExit(f"process {number} ended with {process.exitcode}: {log[-2000:]}")


def kill_one(ranks: list[multiprocessing.Process], after: float, draw: random.Random) -> bool:
    """Kill one process after some seconds, then stop the others; False: they had finished."""
    deadline = time.monotonic() + after
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        time.sleep(0.005)
    victim = draw.choice(ranks)
    was_running = victim.is_alive()
    for process in (victim, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
    for process in ranks:
        process.join()
    return was_running


def main() -> int:
    """Print one JSON line; return 1 if the files differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", default="1")
    parser.add_argument("--part", type=int, default=500, help="rows of a part")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "t.csv", options.rows)
        model = create_model("gmu", {"text": CHARS}, classes=["a", "b"], dim=16)
        model.save(folder / "model")
        data = ["--data.name", "manifest", "--data.root", str(folder / "t.csv")]
        args = ["--model", str(folder / "model"), *data, "--num_workers", options.workers]
        args += ["--row_group", str(options.part), "--device", "cpu"]
        whole, killed = (["--out", str(folder / f"{x}.parquet")] for x in ("whole", "killed"))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert embed([*args, *whole]) == 0  # here, so that a fork need not import anything
        begin = time.monotonic()
        timed = [*args, "--out", str(folder / "timed.npy")]
        finish(start(options.ranks, folder / "meet", timed), folder)
        seconds = time.monotonic() - begin
        kills, left = 0, []
        for number in range(options.kills):
            ranks = start(options.ranks, folder / f"meet-{number}", [*args, *killed])
            kills += kill_one(ranks, draw.uniform(0.1, 0.7) * seconds, draw)
            left.append(len(list((folder / "killed.parquet.parts").glob("*.arrow"))))
        finish(start(options.ranks, folder / "meet-last", [*args, *killed]), folder)
        files = [(folder / f"{x}.parquet").read_bytes() for x in ("whole", "killed")]
    same = files[0] == files[1]
    about = {"benchmark": "embed_kills", "ranks": options.ranks}
    figures = {"kills": kills, "parts_after_each": left, "seconds": round(seconds, 2), "same": same}
    print(json.dumps({**about, **figures}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
