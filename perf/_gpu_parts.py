"""The parts of perf/gpu.py, each run in a process of its own; every function yields figures.

A figure is (case, name, value). A case that raises becomes a row with its error in perf/gpu.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import Clock, cpu_seconds, ratio, seconds
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.utils.flop_counter import FlopCounterMode

import fusionzoo as fz
from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.base import from_memory
from fusionzoo.evaluation.cost import STANDARD, random_features, standard_fusion
from fusionzoo.machine.distributed import World
from fusionzoo.machine.fsdp import shard
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch, Features, StepContext
from fusionzoo.training.build import build_objective
from fusionzoo.training.loaders import build_loader, chunks
from fusionzoo.training.optim import AMP_DTYPES, build_optimizer, param_groups, set_rates
from fusionzoo.training.recompute import save_memory_and_compile
from fusionzoo.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
Figures = Iterator[tuple[str, str, float | str]]
# Dense tensor-core TFLOP/s in bf16 and fp16 with float32 accumulation, from the vendor's data
# sheets; the first pattern that matches the device's name counts.
PEAK_TFLOPS = {
    r"H100 PCIe": 756.0,
    r"H100 NVL": 835.0,
    r"GH200|H200|H100": 989.0,
    r"A100": 312.0,
    r"L40S": 362.0,
    r"L4\b": 121.0,
    r"RTX 4090": 165.2,
    r"RTX 3090": 71.0,
    r"A10\b": 125.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Return a device's peak in half precision, None where it is not known.

    >>> [peak_tflops(x) for x in ("NVIDIA L4", "NVIDIA L40S", "NVIDIA H200", "Quadro")]
    [121.0, 362.0, 989.0, None]
    """
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(name, device_name)), None)


@dataclass(frozen=True)
class Machine:
    """Where the parts run, and how large they are."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def clock(self) -> Clock:
        """What measures a step: on a GPU the time that passes while it works."""
        return time.perf_counter if self.on_gpu else cpu_seconds

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def peak_mib(self, work: Callable[[], object]) -> float:
        """Return the peak of allocated GPU memory during `work`, in MiB."""
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) / 2**20


class CaseError(Exception):
    """An error of one case; the part goes on with the next."""


def guarded(figures: Callable[[], Figures], case: str) -> Figures:
    """Yield the figures of one case; an error becomes the figure `error`."""
    try:
        yield from figures()
    except Exception as error:  # the row says what it was
        message = " ".join(f"{type(error).__name__}: {error}".split())
        yield case, "error", message[:400]


# ---- training steps


@dataclass(frozen=True)
class Size:
    """The size of the model and of the measurement."""

    samples: int
    batch: int
    warm_up: int  # batches of the loader: eight workers have two each ready at the start
    steps: int  # between two times
    rounds: int
    image: dict[str, Any]
    tokens: dict[str, Any]
    dim: int


FULL = Size(
    samples=8192,
    batch=128,
    warm_up=16,
    steps=8,
    rounds=5,
    image={"name": "timm/vit_small_patch16_224", "depth": 6},
    tokens={"dim": 384, "num_layers": 4, "num_heads": 6},
    dim=384,
)
TINY = Size(
    samples=32,
    batch=4,
    warm_up=4,
    steps=2,
    rounds=2,
    image={"name": "timm/vit_tiny_patch16_224", "img_size": 32, "depth": 1},
    tokens={"dim": 32, "num_layers": 1},
    dim=32,
)
TOKENS, TOKEN_WIDTH, CLASSES = 64, 128, 10


def random_data(size: Size) -> PairedDataset:
    """Return images and sequences of noise, in memory."""
    side = size.image.get("img_size", 224)
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(
        256, (size.samples, 3, side, side), dtype=torch.uint8, generator=generator
    )
    sequences = torch.randn(size.samples, TOKENS, TOKEN_WIDTH, generator=generator)
    return from_memory(
        {"image": pictures, "sequence": sequences},
        {"image": "image", "sequence": "sequence"},
        ids=[str(row) for row in range(size.samples)],
        splits=["train"] * size.samples,
        target=[str(row % CLASSES) for row in range(size.samples)],
        source="noise",
        encoders={
            "image": {**size.image, "pretrained": False},
            "sequence": {"name": "sequence/transformer", **size.tokens, "in_dim": TOKEN_WIDTH},
        },
    )


def build_trainer(
    data: PairedDataset, size: Size, machine: Machine, *, amp: str, compiled: bool, fsdp: bool
) -> Trainer:
    """Build a trainer as train.py does; `fsdp` shards the model in the current process group."""
    cfg = from_tree(
        RunConfig,
        {
            "encoders": data.default_encoders,
            "fusion": {"name": "concat_transformer", "dim": size.dim},
            "optim": {"lr": 1e-6},
            "train": {
                "batch_size": size.batch,
                "unimodal": False,
                "amp": amp,
                "compile": compiled,
            },
        },
    )
    torch.manual_seed(0)
    objective, _ = build_objective(cfg, data)
    if compiled and machine.tiny:  # inductor's C++ compiler would take minutes
        for module in (*objective.model.encoders.values(), objective.model.fusion):
            module.compile(backend="aot_eager")
    else:
        save_memory_and_compile(objective.model, cfg.train)
    wrapped: torch.nn.Module = objective.to(machine.device)
    if fsdp:
        wrapped = shard(wrapped, machine.device, AMP_DTYPES[cfg.train.amp])
    groups = param_groups(objective.model, objective.heads, cfg.optim)
    optimizer = build_optimizer(groups, cfg.optim)
    return Trainer(wrapped, optimizer, cfg, World(0, 1, machine.device))


def resident_batches(data: PairedDataset, trainer: Trainer, count: int) -> list[Batch]:
    """Collate batches and copy them to the device."""
    size, device = trainer.cfg.train.batch_size, trainer.world.device
    collate = trainer.module.model.collate(train=True)
    return [
        collate([data[number * size + row] for row in range(size)]).to(device)
        for number in range(count)
    ]


def steps(machine: Machine) -> Figures:
    """Training steps in bf16 and fp16, eager and compiled, against a bare loop; MFU, data wait."""
    size = TINY if machine.tiny else FULL
    data = random_data(size)
    for compiled in (False, True):
        for amp in ("bf16", "fp16"):
            case = f"{amp} {'compiled' if compiled else 'eager'}"
            yield from guarded(lambda: _steps(case, data, size, machine, amp, compiled), case)  # noqa: B023
            torch.compiler.reset()


def _steps(
    case: str, data: PairedDataset, size: Size, machine: Machine, amp: str, compiled: bool
) -> Figures:
    trainer = build_trainer(data, size, machine, amp=amp, compiled=compiled, fsdp=False)
    batches = resident_batches(data, trainer, 4)
    model = trainer.module.model
    bare = bare_loop(model, batches, amp, size.steps, machine)

    def ours() -> None:
        for step in range(size.steps):
            set_rates(trainer.optimizer, {"": 1e-6})
            trainer.step([batches[step % 4]], StepContext(step))
        machine.synchronize()

    began = time.perf_counter()
    ours()
    yield case, "first_steps_s", time.perf_counter() - began  # compilation included
    figures = ratio(ours, bare, size.rounds, machine.clock)
    rows = size.steps * size.batch
    yield case, "samples_per_s", rows / figures["ours_s"]
    yield case, "bare_samples_per_s", rows / figures["bare_s"]
    yield case, "time_over_bare", figures["ratio"]
    from_loader = samples_per_second_from_loader(trainer, data, size, machine)
    yield case, "samples_per_s_with_loader", from_loader
    yield case, "share_of_data_wait", max(0.0, 1 - from_loader / (rows / figures["ours_s"]))
    if machine.on_gpu:
        yield case, "peak_MiB", machine.peak_mib(ours)
    flops = flops_per_sample(data, size, machine, amp)
    yield case, "GFLOP_per_sample", flops / 1e9
    peak = peak_tflops(torch.cuda.get_device_name(machine.device)) if machine.on_gpu else None
    if peak is not None:
        yield case, "mfu", flops * rows / figures["ours_s"] / (peak * 1e12)
        yield case, "bare_mfu", flops * rows / figures["bare_s"] / (peak * 1e12)


def bare_loop(
    model: FusionModel, batches: list[Batch], amp: str, count: int, machine: Machine
) -> Callable[[], None]:
    """Return `count` steps of a plain PyTorch loop over the same model and tensors."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    scaler = GradScaler(machine.device.type, enabled=amp == "fp16")

    def loop() -> None:
        for step in range(count):
            batch = batches[step % len(batches)]
            with torch.autocast(machine.device.type, AMP_DTYPES[amp]):
                logits = model(batch).logits
            assert batch.target is not None
            loss = F.cross_entropy(logits.float(), batch.target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        machine.synchronize()

    return loop


def samples_per_second_from_loader(
    trainer: Trainer, data: PairedDataset, size: Size, machine: Machine
) -> float:
    """Train an epoch on batches from the loader, and time it without its first batches."""
    collate = trainer.module.model.collate(train=True)
    loader = build_loader(data, collate, trainer.cfg, trainer.world, "train")
    began, rows = 0.0, 0
    for step, batches in enumerate(chunks(loader, 1, 0)):
        if step == size.warm_up:
            machine.synchronize()
            began = time.perf_counter()
        trainer.step(batches, StepContext(step))
        rows += len(batches[0].ids) if step >= size.warm_up else 0
    machine.synchronize()
    return rows / (time.perf_counter() - began)


def flops_per_sample(data: PairedDataset, size: Size, machine: Machine, amp: str) -> float:
    """Count the floating-point operations of forward and backward, uncompiled, per sample."""
    trainer = build_trainer(data, size, machine, amp=amp, compiled=False, fsdp=False)
    batch = resident_batches(data, trainer, 1)[0]
    assert batch.target is not None
    counter = FlopCounterMode(display=False)
    with counter:
        with torch.autocast(machine.device.type, AMP_DTYPES[amp]):
            logits = trainer.module.model(batch).logits
        F.cross_entropy(logits.float(), batch.target).backward()
    return counter.get_total_flops() / size.batch


# ---- every fusion


def fusions(machine: Machine) -> Figures:
    """Forward and backward of every fusion, in bf16 on a GPU: milliseconds and memory."""
    for name in fz.list_fusions():
        yield from guarded(lambda: _fusion(name, machine), name)  # noqa: B023


def _fusion(name: str, machine: Machine) -> Figures:
    torch.manual_seed(0)
    fusion = standard_fusion(name).to(machine.device).train()
    features = {
        modality: Features(*(x.to(machine.device) for x in tensors))
        for modality, tensors in random_features(STANDARD, 2 if machine.tiny else 64).items()
    }

    def work() -> None:
        fusion.zero_grad(set_to_none=True)
        with torch.autocast(machine.device.type, torch.bfloat16, enabled=machine.on_gpu):
            output = fusion(features)
        loss = output.logits.float().square().sum() + output.embedding.float().square().sum()
        loss.backward()
        machine.synchronize()

    work()
    rounds = 1 if machine.tiny else 9
    yield (
        name,
        "milliseconds",
        1000 * statistics.median(seconds(work, machine.clock) for _ in range(rounds)),
    )
    grads = [p.grad for p in fusion.parameters() if p.grad is not None]
    finite = all(bool(grad.isfinite().all()) for grad in grads)
    yield name, "finite_gradients", "yes" if finite and grads else "no"
    if machine.on_gpu:
        yield name, "peak_MiB", machine.peak_mib(work)


# ---- cells of the benchmark


def cells(machine: Machine) -> Figures:
    """Trials of the benchmark on the device, frozen and end to end, in one process and in two."""
    data = {"name": "interactions", "samples": 200} if machine.tiny else {"name": "digits"}
    names = ["gmu", "concat"] if machine.tiny else ["gmu", "mbt", "late_mean", "concat_transformer"]
    modes = [("probe", 1), ("finetune", 1), ("probe", 2)]
    for mode, jobs in modes[: 2 if machine.tiny else 3]:
        case = f"{mode}, {jobs} processes"
        yield from guarded(lambda: _cells(case, data, names, mode, jobs, machine), case)  # noqa: B023


def _cells(
    case: str, data: dict[str, Any], names: list[str], mode: str, jobs: int, machine: Machine
) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        report = fz.benchmark(
            data,
            fusions=names,
            seeds=1,
            out=Path(folder) / "report",
            mode=mode,
            folds=0,
            epochs=1 if machine.tiny else 3,
            encoder_epochs=1 if machine.tiny else 3,
            corruptions=False,
            controls=False,
            jobs=jobs,
            device=str(machine.device),
        )
        yield case, "seconds", time.perf_counter() - began
        if report.failed:
            raise CaseError(str(report.failed))
        for line in report.figures["leaderboard"]:
            if line["candidate"] in names:
                yield case, f"accuracy of {line['candidate']}", line["accuracy"]


# ---- several processes


def distributed(machine: Machine) -> Figures:
    """FSDP and collectives in a group of one, then DDP and FSDP on all GPUs (CPU: 2 processes)."""
    backend = "nccl" if machine.on_gpu else "gloo"
    case = f"fsdp, {backend}, 1 process"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        yield from guarded(lambda: _group_of_one(case, backend, store, machine), case)
    count = torch.cuda.device_count() if machine.on_gpu else 2
    for strategy in ("ddp", "fsdp") if count > 1 else ():
        case = f"{strategy}, {backend}, {count} processes"
        yield from guarded(lambda: _launched(case, strategy, backend, count, machine), case)  # noqa: B023


def _group_of_one(case: str, backend: str, store: str, machine: Machine) -> Figures:
    if machine.on_gpu:
        torch.cuda.set_device(machine.device)
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        value = torch.full((1,), 3.0, device=machine.device)
        dist.all_reduce(value)
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, "object")
        works = value.item() == 3.0 and gathered == ["object"]
        yield case, "collectives", "right" if works else "wrong"
        data, losses = random_data(TINY), {}
        for fsdp in (False, True):
            trainer = build_trainer(
                data,
                TINY,
                machine,
                amp="bf16" if machine.on_gpu else "none",
                compiled=False,
                fsdp=fsdp,
            )
            set_rates(trainer.optimizer, {"": 1e-3})
            batches = resident_batches(data, trainer, 2)
            torch.manual_seed(1)  # of dropout
            losses[fsdp] = [
                float(trainer.step([batches[step % 2]], StepContext(step)).loss)
                for step in range(4)
            ]
        gap = max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True))
        yield case, "largest_gap_of_losses", gap
        if gap > 0.05:  # bf16 has 8 bits
            raise CaseError(f"losses {losses[True]} sharded, {losses[False]} whole")
    finally:
        dist.destroy_process_group()


def _launched(case: str, strategy: str, backend: str, count: int, machine: Machine) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            *run_flags(machine, Path(folder) / "run"),
        ]
        command += ["--dist.nproc", str(count), "--dist.strategy", strategy]
        command += ["--dist.backend", backend, "--dist.timeout", "60"]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        yield case, "seconds", time.perf_counter() - began
        yield case, "exit_code", done.returncode
        if done.returncode:
            raise CaseError(done.stderr.strip()[-300:])


def run_flags(machine: Machine, out: Path) -> list[str]:
    """Return the flags of a short run of train.py on the device."""
    flags = ["--data.name", "digits", "--fusion.name", "gmu", "--train.epochs", "2"]
    if machine.tiny:
        flags = ["--data.name", "interactions", "--data.samples", "100", "--train.epochs", "2"]
    flags += ["--device", "cuda" if machine.on_gpu else "cpu", "--log", "none", "--out", str(out)]
    return [*flags, "--preset", "none", "--train.num_workers", "0", "--train.log_every", "1"]


# ---- what goes wrong


def out_of_memory(machine: Machine) -> Figures:
    """Fill the GPU's memory, then train: our error is one line. On a CPU the error is raised."""
    case = "GPU memory filled" if machine.on_gpu else "error raised by hand"
    yield from guarded(lambda: _out_of_memory(case, machine), case)


def _out_of_memory(case: str, machine: Machine) -> Figures:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flags = run_flags(machine, Path(folder) / "run")
        ballast: list[torch.Tensor] = []
        if machine.on_gpu:
            flags += ["--train.batch_size", "1024", "--encoders.image.name", "timm/resnet50"]
            flags += ["--encoders.image.pretrained", "false", "--encoders.image.size", "224"]
            square = torch.ones(64, 64, device=machine.device)
            (square @ square).sum().item()  # the libraries take their workspace first
            free, _ = torch.cuda.mem_get_info(machine.device)
            left = 3 * 2**30
            size = max(0, free - left)
            ballast.append(torch.empty(size, dtype=torch.uint8, device=machine.device))
            yield case, "GiB_left", min(free, left) / 2**30
        else:
            stack.enter_context(replaced_step(_raise_out_of_memory))
        written = io.StringIO()
        with contextlib.redirect_stderr(written):
            code = train(flags)
        errors = [line for line in written.getvalue().splitlines() if line.startswith("error: ")]
        yield case, "exit_code", code
        yield case, "message", errors[-1] if errors else ""
        traceback = "Traceback" in written.getvalue()
        if code != 2 or traceback or len(errors) != 1 or "out of memory" not in errors[0]:
            raise CaseError(f"exit code {code}, stderr {written.getvalue()[-300:]!r}")
        ballast.clear()


def _raise_out_of_memory(step: Callable[..., Any]) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("planted: out of memory")

    return raises


@contextlib.contextmanager
def replaced_step(edit: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace `Trainer.step` by an edited one inside the block."""
    step = Trainer.step
    Trainer.step = edit(step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.step = step  # type: ignore[method-assign]


# ---- resume


def resume(machine: Machine) -> Figures:
    """Stop a run by SIGTERM, resume it, and compare its weights bit for bit with a whole run."""
    # perf/gpu.py sets CUBLAS_WORKSPACE_CONFIG, which deterministic matrix products need.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    for amp in ("none",) if machine.tiny else ("none", "bf16", "fp16"):
        yield from guarded(lambda: _resume(amp, machine), amp)  # noqa: B023


def _resume(amp: str, machine: Machine) -> Figures:
    case = {"none": "fp32"}.get(amp, amp)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in ("whole", "again", "resumed")}
        for name, out in runs.items():
            flags = [*run_flags(machine, out), "--train.amp", amp]
            if name == "resumed":
                with replaced_step(_stopping):
                    code = _train_silently(flags)
                if code != 75:
                    raise CaseError(f"stopped by SIGTERM with exit code {code}, not 75")
                flags += ["--resume"]
            if code := _train_silently(flags):
                raise CaseError(f"the run {name!r} ended with exit code {code}")
        whole = weights(runs["whole"])
        for name in ("again", "resumed"):
            others = weights(runs[name])
            differing = [key for key in whole if not torch.equal(whole[key], others[key])]
            words = (
                f"{len(differing)} of {len(whole)} tensors differ" if differing else "bit for bit"
            )
            yield case, name, words
            if differing:
                raise CaseError(f"{name}: {words}, the first is {differing[0]}")


def _train_silently(flags: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return train(flags)


def _stopping(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that asks this process to stop after the third."""
    count = 0

    def stops(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **kwargs)

    return stops


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return a finished run's weights."""
    from safetensors.torch import load_file

    return load_file(run / "model" / "model.safetensors")


PARTS: dict[str, Callable[[Machine], Figures]] = {
    "steps": steps,
    "fusions": fusions,
    "cells": cells,
    "distributed": distributed,
    "out_of_memory": out_of_memory,
    "resume": resume,
}
