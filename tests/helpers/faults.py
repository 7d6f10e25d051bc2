"""Inject faults into runs: `python tests/helpers/faults.py` writes results/faults.csv.

Each fault hits a small run (`interactions`, checkpoints every 3 steps, EMA and accumulation on).
A row says how the run ended, what it said, how many steps were lost, and whether the resumed run
equals one that nothing happened to, bit for bit. `expected` is the contract; a row that breaks it
makes the script fail. Needs root for the small disks. `--only nan disk` runs the faults so named,
`--sample 2` at most two of each kind; tests/training/test_interrupted_runs.py does, and then
nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import torch

import fusionzoo.encoders
import fusionzoo.training.build  # noqa: F401, what a run imports, imported once
from fusionzoo.scripts.train import main as train
from fusionzoo.training import run_folder

ROOT = Path(__file__).parents[2]
OUT = ROOT / "results" / "faults.csv"
EVERY = 3  # steps between two checkpoints
RUN = ["--data.name", "interactions", "--data.samples", "400", "--train.epochs", "12"]
RUN += ["--train.save_every", str(EVERY), "--train.accumulate", "2", "--train.ema", "0.9"]
RUN += ["--log", "none", "--train.log_every", "1", "--data.missing", "0.2"]
RUN += ["--train.max_bad_steps", "3"]

KINDS = ("killed", "asked", "killed_in_writing", "damaged", "disk", "nan", "folder", "media")
KINDS += ("processes",)


@dataclass
class Row:
    """The outcome of one fault."""

    fault: str
    detail: str
    exit_code: int
    reported: str
    steps_lost: int | str  # "" where nothing was running
    after: str  # what the resumed run is, against an undisturbed one
    expected: bool


def fork(args: list[str], log: Path, inject: Callable[[], None] = lambda: None) -> int:
    """Run train.py in a forked process, which saves importing torch each time; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = 1
        try:
            inject()
            code = train(args)
        except BaseException as error:  # a traceback is what a user should never see
            print(f"TRACEBACK {type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def wait(pid: int) -> int:
    """Return the exit code, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def steps(out: Path) -> int:
    """Return the number of steps in the log."""
    log = out / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    numbers = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(numbers, default=0)


def saved(out: Path) -> int:
    """Return the step of the newest undamaged checkpoint."""
    return run_folder.read_newest(out / "checkpoints" / "last.pt")[0]["state"]["step"]


def said(log: Path, *marks: str) -> str:
    """Return the last line of the output that contains one of the marks."""
    lines = log.read_text().replace("\r", "\n").splitlines()
    matches = [line for line in lines if any(mark in line for mark in marks)]
    text = matches[-1].replace(f"{log.parent}/", "") if matches else ""
    return text.strip()[:300]


def compare(whole: Path, out: Path) -> str:
    """Compare two finished runs bit for bit."""
    if not (out / "metrics.json").is_file():
        return "not finished"
    ours, theirs = (run_folder.read(x / "checkpoints" / "last.pt") for x in (whole, out))
    for name, tensor in ours["objective"].items():
        if not torch.equal(tensor, theirs["objective"][name]):
            return f"differs in {name}"
    tests = [json.loads((x / "metrics.json").read_text())["test"] for x in (whole, out)]
    logs = [(x / "metrics.jsonl").read_text() for x in (whole, out)]
    return "bit for bit" if tests[0] == tests[1] and logs[0] == logs[1] else "figures differ"


class Bench:
    """A folder with an undisturbed run, and the faults."""

    def __init__(self) -> None:
        self.home = Path(mkdtemp(prefix="faults-"))
        self.whole, self.number = self.home / "whole", 0
        assert wait(fork([*RUN, "--out", str(self.whole)], self.home / "whole.log")) == 0
        self.total = steps(self.whole)
        self.rng = random.Random(0)

    def fresh(self) -> tuple[Path, Path]:
        """Return a folder and a log for the next run."""
        self.number += 1
        return self.home / f"run-{self.number}", self.home / f"run-{self.number}.log"

    def until(self, pid: int, out: Path, step: int) -> None:
        """Wait for a step of a run."""
        while steps(out) < step and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.002)

    def resume(self, out: Path, *more: str) -> tuple[int, str, Path]:
        """Resume; return exit code, comparison with the undisturbed run, and the log."""
        log = out.with_suffix(".again")
        code = wait(fork(["--resume", "--out", str(out), *more], log))
        return code, compare(self.whole, out), log

    # ---- faults: each yields rows

    def killed(self) -> Iterator[Row]:
        for _ in range(20):
            out, log = self.fresh()
            step = self.rng.randrange(1, self.total - 5)
            pid = fork([*RUN, "--out", str(out)], log)
            self.until(pid, out, step)
            os.kill(pid, signal.SIGKILL)
            code = wait(pid)
            lost = steps(out) - saved(out)
            after = self.resume(out)[1]
            fine = code == -9 and 0 <= lost <= EVERY and after == "bit for bit"
            yield Row("kill -9", f"at step {step}", code, "", lost, after, fine)

    def asked(self) -> Iterator[Row]:
        for number, wanted in [(signal.SIGTERM, 75)] * 2 + [
            (signal.SIGUSR1, 75),
            (signal.SIGINT, 130),
        ]:
            out, log = self.fresh()
            step = self.rng.randrange(2, self.total - 10)
            pid = fork([*RUN, "--out", str(out)], log)
            self.until(pid, out, step)
            os.kill(pid, number)
            code, lost = wait(pid), steps(out) - saved(out)
            after = self.resume(out)[1]
            fine = code == wanted and lost == 0 and after == "bit for bit"
            name, says = signal.Signals(number).name, said(log, "stopped at")
            yield Row(name, f"after step {step}", code, says, lost, after, fine)

    def killed_in_writing(self) -> Iterator[Row]:
        for place in ("_seal", "_rotate", "fsync"):
            out, log = self.fresh()
            calls, first = {"left": 3}, out / "checkpoints" / "last.pt"

            def inject(
                place: str = place, calls: dict[str, int] = calls, first: Path = first
            ) -> None:
                owner = os if place == "fsync" else run_folder
                real = getattr(owner, place)

                def dies(*args: object) -> None:
                    calls["left"] -= first.is_file()
                    if not calls["left"]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    real(*args)

                setattr(owner, place, dies)

            code = wait(fork([*RUN, "--out", str(out)], log, inject))
            lost = steps(out) - saved(out)
            after = self.resume(out)[1]
            fine = code == -9 and lost <= EVERY and after == "bit for bit"
            yield Row("kill -9 in a checkpoint", f"in {place}", code, "", lost, after, fine)

    def damaged(self) -> Iterator[Row]:
        for file, what, wanted in (
            ("last.pt", "cut in half", "bit for bit"),
            ("last.pt", "empty", "bit for bit"),
            ("last.pt", "a bit flipped in the weights", "bit for bit"),
            ("last.pt", "a bit flipped at the end", "bit for bit"),
            ("last.pt", "replaced by a pickle that runs code", "bit for bit"),
            ("best.pt", "a bit flipped in the weights", "bit for bit"),
            ("last.pt last-1.pt", "a bit flipped in the weights", "not finished"),
        ):
            out, log = self.fresh()
            pid = fork([*RUN, "--out", str(out)], log)
            self.until(pid, out, self.total // 2)
            os.kill(pid, signal.SIGTERM)
            wait(pid)
            before = saved(out)
            for name in file.split():
                damage(out / "checkpoints" / name, what)
            lost = before - saved(out) if wanted == "bit for bit" else before
            code, after, again = self.resume(out)
            says = said(again, "warning:", "error:", "have changed", "cut off")
            ran = (out / "ran").exists()
            fine = after == wanted and not ran and (bool(says) or file == "best.pt")
            yield Row(f"damaged {file}", what, code, says, lost, after, fine)

    def disk(self) -> Iterator[Row]:
        size = (self.whole / "checkpoints" / "last.pt").stat().st_size
        for what in ("full disk", "read-only folder"):
            out, log = self.fresh()
            with small_disk(out, int((2.6 if what == "full disk" else 100) * size)):
                run = [*RUN, "--out", str(out / "run")]
                if what == "full disk":
                    code = wait(fork(run, log))
                else:
                    pid = fork(run, log)
                    self.until(pid, out / "run", 10)
                    # A file open for writing keeps a file system writable: put a wall before it.
                    subprocess.run(["mount", "--bind", out / "run", out / "run"], check=True)
                    subprocess.run(["mount", "-o", "remount,bind,ro", out / "run"], check=True)
                    code = wait(pid)
                    subprocess.run(["umount", "-l", out / "run"], check=True)
                says = said(log, "error:", "TRACEBACK")
                subprocess.run(["mount", "-o", "remount,size=64m", out], check=True)
                lost = steps(out / "run") - saved(out / "run")
                after = self.resume(out / "run")[1]
            fine = code == 2 and "error:" in says and lost <= EVERY and after == "bit for bit"
            yield Row(what, "then fixed, and resumed", code, says, lost, after, fine)

    def nan(self) -> Iterator[Row]:
        for what, samples, wanted in (
            ("one sample, once", "one", 0),
            ("one sample, in every epoch", "every", 0),
            ("infinite weights in an encoder from step 20 on", "weights", 2),
            ("every sample", "all", 2),
        ):
            out, log = self.fresh()
            code = wait(fork([*RUN, "--out", str(out)], log, poison(samples)))
            says = said(log, "error:") or said(log, "skipped")
            after = compare(self.whole, out) if code else "finished without that step"
            named = "samples '" in says
            lost = max(0, steps(out) - saved(out)) if code else says.count("skipped")
            fine = code == wanted and named and (code != 0 or (out / "metrics.json").is_file())
            yield Row("NaN", what, code, says, lost, after, fine)

    def folder(self) -> Iterator[Row]:
        out, log = self.fresh()
        pid = fork([*RUN, "--out", str(out)], log)
        self.until(pid, out, 5)
        os.kill(pid, signal.SIGSTOP)  # or it might be over before the second begins
        second = self.home / "second.log"
        code = wait(fork([*RUN, "--out", str(out)], second))
        os.kill(pid, signal.SIGCONT)
        first = wait(pid)
        says, after = said(second, "error:"), compare(self.whole, out)
        fine = (code, first) == (2, 0) and after == "bit for bit"
        yield Row("two runs in one folder", "the second, anew", code, says, 0, after, fine)

    def media(self) -> Iterator[Row]:
        for on_error, wanted in (("raise", 2), ("missing", 0), ("skip", 0)):
            out, log = self.fresh()
            manifest = broken_pictures(out.with_suffix(".data"))
            args = ["--data.name", "manifest", "--data.root", str(manifest)]
            args += ["--data.on_error", on_error, "--encoders.text.name", "chars"]
            args += ["--encoders.image.name", "timm/resnet10t", "--encoders.image.size", "32"]
            args += ["--encoders.image.pretrained", "false", "--train.epochs", "1"]
            code = wait(fork([*args, "--log", "none", "--out", str(out)], log))
            says = said(log, "error:", "could not be decoded")
            fine = code == wanted and "3" in says
            after = "finished" if code == 0 else "not finished"
            yield Row("corrupt picture", f"on_error={on_error}", code, says, "", after, fine)

    def processes(self) -> Iterator[Row]:
        """Two real processes under torchrun; one is killed, or stops answering."""
        both = ["--train.batch_size", "16", "--dist.timeout", "15"]
        whole = self.home / "whole-2"
        assert torchrun([*RUN, *both, "--out", str(whole)], self.home / "whole-2.log").wait() == 0
        for what, number in (
            ("killed", signal.SIGKILL),
            ("killed", signal.SIGKILL),
            ("hangs", signal.SIGSTOP),
        ):
            out, log = self.fresh()
            run = torchrun([*RUN, *both, "--out", str(out)], log)
            step = self.rng.randrange(5, self.total // 2)
            while steps(out) < step and run.poll() is None:
                time.sleep(0.01)
            os.kill(ranks_of(run.pid)[-1], number)
            since = time.perf_counter()
            code = run.wait()
            took = time.perf_counter() - since
            says = said(log, "error: process") or said(log, "exitcode", "Signal")
            lost = steps(out) - saved(out)
            again = torchrun(["--resume", "--out", str(out)], out.with_suffix(".again")).wait()
            after = compare(whole, out)
            fine = code != 0 and again == 0 and lost <= EVERY and after == "bit for bit"
            detail = f"one of two, at step {step}; all over in {took:.0f} s"
            yield Row(f"process {what} under torchrun", detail, code, says, lost, after, fine)


def damage(path: Path, what: str) -> None:
    """Break a file."""
    data = bytearray(path.read_bytes())
    if what == "cut in half":
        data = data[: len(data) // 2]
    elif what == "empty":
        data = bytearray()
    elif "pickle" in what:
        ran = path.parent.parent / "ran"
        data = bytearray(f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode())
    else:
        data[-5 if "end" in what else len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a disk of the given size in bytes."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def poison(samples: str) -> Callable[[], None]:
    """Return a hook that makes values NaN inside the training process."""

    def inject() -> None:
        from fusionzoo.datasets import PairedDataset
        from fusionzoo.training.trainer import Trainer

        real, calls = PairedDataset.__getitem__, {"bad": 0}

        def get(self: PairedDataset, key: tuple[int, int]) -> object:
            sample = real(self, key)
            assert sample is not None
            index = key[0] if isinstance(key, tuple) else key
            hit = samples == "all" or (index == 7 and (samples == "every" or calls["bad"] < 1))
            if hit and sample.split == "train" and sample.values["a"] is not None:
                calls["bad"] += 1
                values = {**sample.values, "a": torch.full_like(sample.values["a"], float("nan"))}
                return sample._replace(values=values)
            return sample

        def learn(self: Trainer, batches: object, context: object, **flags: object) -> object:
            if context.step == 20:  # type: ignore[attr-defined]
                next(self.module.model.encoders["b"].parameters()).data.fill_(float("inf"))
            return call(self, batches, context, **flags)  # type: ignore[arg-type]

        call = Trainer.step
        if samples == "weights":
            Trainer.step = learn  # type: ignore[method-assign, assignment]
        else:
            PairedDataset.__getitem__ = get  # type: ignore[method-assign, assignment]

    return inject


def broken_pictures(folder: Path) -> Path:
    """Write a manifest of 40 images, the third of which is cut off."""
    from PIL import Image

    folder.mkdir()
    lines = ["id,split,target,image,text"]
    for number in range(40):
        Image.new("RGB", (32, 32), (number * 6, 90, 40)).save(folder / f"{number}.png")
        split = ("train", "train", "val", "test")[number // 10]
        lines.append(f"{number},{split},{'ab'[number % 2]},{number}.png,word {number}")
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:40])
    (folder / "m.csv").write_text("\n".join(lines) + "\n")
    return folder / "m.csv"


def torchrun(args: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start two processes the way a user does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--", "train.py", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)


def ranks_of(agent: int) -> list[int]:
    """The processes that torchrun started."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children]


def main() -> int:
    torch.set_num_threads(1)  # a forked process must not inherit a pool of threads
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--sample", type=int, help="faults of a kind")
    options = parser.parse_args()
    bench, rows = Bench(), []
    for what in options.only:
        for row in islice(getattr(bench, what)(), options.sample):
            print("ok  " if row.expected else "FAIL", *asdict(row).values(), sep=" | ", flush=True)
            rows.append(row)
    if options.only == KINDS and options.sample is None:
        with OUT.open("w", newline="") as file:
            table = csv.DictWriter(file, [one.name for one in fields(Row)])
            table.writeheader()
            table.writerows(asdict(row) for row in rows)
        print(f"{len(rows)} faults in {OUT}")
    shutil.rmtree(bench.home, ignore_errors=True)
    return 0 if all(row.expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
