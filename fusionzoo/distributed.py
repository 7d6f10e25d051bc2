"""Processes: launch, process group, collectives, signals, exit, and glibc's memory."""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import gc
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fusionzoo.config import DistConfig
from fusionzoo.errors import FusionZooError

PERIOD = 1.0  # seconds between two looks at the launcher
GRACE = 30.0  # seconds to save after SIGTERM, as torchrun gives


def exit_code(signals: list[int]) -> int:
    """Return 130 after Ctrl-C, as shells do, else 75, which sysexits.h reads as "try again"."""
    return 130 if signals[:1] == [signal.SIGINT] else 75


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGUSR1 instead of dying: the run saves after its step."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """Under torchrun or `--dist.nproc`: end this process once its launcher has ended.

    Processes have sessions of their own, so a launcher that is killed leaves them running. They
    then get the SIGTERM that it would have sent, and SIGKILL if they do not end in time.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a shell that is logged out of ends no run
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(PERIOD)
        # From every rank: the first one that notices stops the others before they have looked.
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: the launcher (process {launcher}) is gone: stopping", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_launcher", daemon=True).start()


# Buffers of an Objective that are constant, or that only evaluation reads (running statistics): DDP
# need not broadcast them in every step.
RARELY_SHARED = ("model.encoders.", "heads.", "tasks.")


@dataclass(frozen=True)
class World:
    """Rank, number of processes and device of this process."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


@contextmanager
def process_group(cfg: DistConfig, device: str = "auto") -> Iterator[World]:
    """Join the process group, if there are several processes; destroy it on exit.

    Reads RANK, WORLD_SIZE and LOCAL_RANK (torchrun, SLURM wrappers), else `cfg.rank` and
    `cfg.world_size`. `backend="auto"` is NCCL where each process has a GPU, else gloo.
    """
    end_with_launcher()
    rank = int(os.environ.get("RANK", cfg.rank or 0))
    size = int(os.environ.get("WORLD_SIZE", cfg.world_size or 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    torch_device = pick_device(device, local_rank, size)
    if size == 1:
        with _float64_missing(torch_device):
            yield World(0, 1, torch_device)
        return
    if cfg.strategy not in ("ddp", "fsdp"):
        raise FusionZooError(
            f"--dist.strategy {cfg.strategy} is for one process, and this is one of {size}:"
            " use ddp or fsdp, or start it without torchrun"
        )
    backend = pick_backend(cfg.backend, torch_device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    # With env:// torch reads rank and size from the environment.
    rank_arguments: dict[str, Any] = {}
    if cfg.init_method != "env://":
        rank_arguments = {"rank": rank, "world_size": size}
    try:
        dist.init_process_group(
            backend,
            init_method=cfg.init_method,
            timeout=timedelta(seconds=cfg.timeout),
            **rank_arguments,
        )
    except (ValueError, RuntimeError, dist.DistError) as error:
        raise FusionZooError(
            f"process {rank} of {size} cannot join the others by {cfg.init_method}: {error}"
        ) from error
    world = World(rank, size, torch_device)
    try:
        yield world
    except RuntimeError as error:
        peer_error = _lost(error, world, cfg.timeout)
        if peer_error is None:
            raise
        raise peer_error from error
    finally:
        gc.collect()  # a DDP module in a reference cycle must not outlive its group
        dist.destroy_process_group()


@contextmanager
def _float64_missing(device: torch.device) -> Iterator[None]:
    """Say in one line what to do where a part needs float64, which Apple's GPUs lack."""
    try:
        yield
    except TypeError as error:
        if device.type != "mps" or "float64" not in str(error):
            raise
        raise FusionZooError(
            "a part of this run computes in float64, which an mps GPU lacks (some strategies of"
            " --balance do): use --device cpu, or leave it out"
        ) from error


def _lost(error: RuntimeError, world: World, timeout: float) -> FusionZooError | None:
    """Return a one-line error if another process died or hangs; None for any other error."""
    text = str(error)
    if not (isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text):
        return None
    late = "imed out" in text or "imeout" in text
    failure = f"did not answer within {timeout:g} s" if late else "ended"
    return FusionZooError(
        f"process {world.rank} of {world.size}: another process {failure} (its own message says"
        f" why, --dist.timeout sets the wait); --resume goes on from the last checkpoint."
        f" [{text.splitlines()[0]}]"
    )


GPUS = ("cuda", "xpu", "mps")  # of NVIDIA and AMD, Intel, Apple; `auto` takes the first it finds


def count_gpus(kind: str) -> int:
    """Return how many GPUs of a kind this torch can use here."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return getattr(torch, kind).device_count() if getattr(torch, kind).is_available() else 0


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, as results record it, or `cpu`."""
    if device.type in ("cuda", "xpu"):
        return str(getattr(torch, device.type).get_device_name(device))
    return device.type


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is for lack of memory, on a GPU or in torch's allocator on the CPU."""
    lacking = ("can't allocate memory", "MPS backend out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(x in str(error) for x in lacking)


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows tie no process to cores


def pick_device(name: str, local_rank: int = 0, num_processes: int = 1) -> torch.device:
    """Resolve `auto`: the GPU of this process if there is one, else the CPU.

    Several processes train on CUDA GPUs or on the CPU.
    """
    kinds = GPUS if num_processes == 1 else ("cuda",)
    if name == "auto":
        name = next((kind for kind in kinds if count_gpus(kind)), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FusionZooError(
            f"--device {name!r} is none: auto, cpu, cuda, cuda:1, xpu or mps"
        ) from None
    if device.type not in GPUS:
        return device
    if device.type not in kinds:
        raise FusionZooError(f"--device {name} is for one process: use cuda or cpu, or start one")
    index = local_rank if device.index is None else device.index
    if index >= count_gpus(device.type):
        raise FusionZooError(
            f"--device {name}: process {local_rank} would need GPU {index}, and there are"
            f" {count_gpus(device.type)} here; --device auto takes what there is"
        )
    return torch.device(device.type, index)


def pick_backend(name: str, device: torch.device) -> str:
    """Resolve `auto`; raise if the backend is not available."""
    if name == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if not getattr(dist, f"is_{name}_available")():
        raise FusionZooError(f"this torch was built without {name}: --dist.backend auto works")
    if name == "nccl" and device.type != "cuda":
        raise FusionZooError("--dist.backend nccl needs a GPU for each process: use gloo")
    return name


def wrap(
    module: nn.Module, cfg: DistConfig, world: World, amp: torch.dtype | None = None
) -> nn.Module:
    """Wrap `module` in DDP, FSDP or DataParallel; its state dict stays unprefixed.

    Parameters are replaced under `fsdp`: build the optimiser afterwards.
    """
    if cfg.strategy == "dp":
        if torch.cuda.device_count() < 2:
            raise FusionZooError(
                f"--dist.strategy dp splits a batch over several GPUs, and there are"
                f" {torch.cuda.device_count()} here: use --dist.strategy none"
            )
        return nn.DataParallel(module)
    if world.size == 1:
        return module
    if cfg.sync_batchnorm and cfg.strategy == "ddp":
        if world.device.type != "cuda":
            raise FusionZooError("--dist.sync_batchnorm shares statistics between GPUs only")
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if cfg.strategy == "fsdp":
        from fusionzoo.fsdp import shard

        return shard(module, world.device, amp)
    ids = [world.device.index] if world.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel
    # DDP would broadcast them before every forward pass; `Trainer.share_statistics` does so rarely.
    names = [name for name, _ in module.named_buffers() if name.startswith(RARELY_SHARED)]
    ddp._set_params_and_buffers_to_ignore_for_model(module, names)
    return ddp(module, device_ids=ids, gradient_as_bucket_view=True)


def seed_everything(seed: int) -> None:
    """Seed every generator that training draws from."""
    random.seed(seed)
    torch.manual_seed(seed)


def gpu_random_state(device: torch.device) -> Tensor | None:
    """Return the state of a GPU's generator; None for the CPU, which has torch's own."""
    if device.type not in GPUS:
        return None
    state: Tensor = getattr(torch, device.type).get_rng_state(*_numbered(device))
    return state


def set_gpu_random_state(state: Tensor | None, device: torch.device) -> None:
    """Set what `gpu_random_state` returned."""
    if state is not None:
        getattr(torch, device.type).set_rng_state(state, *_numbered(device))


def _numbered(device: torch.device) -> list[torch.device]:
    """Return the device as an argument of torch.cuda and torch.xpu; torch.mps has one GPU."""
    return [] if device.type == "mps" else [device]


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Leave the global generators as they were."""
    state, state_of_python = gpu_random_state(device), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        set_gpu_random_state(state, device)
        random.setstate(state_of_python)


def wait_for(device: torch.device) -> None:
    """Wait for a GPU, whose calls return before their work is done."""
    if device.type in GPUS:
        getattr(torch, device.type).synchronize(*_numbered(device))


def total(values: Tensor, world: World) -> Tensor:
    """Sum `values` over the processes (all-reduce)."""
    if world.size == 1:
        return values
    shared = values.to(world.device)  # NCCL needs tensors on the GPU
    dist.all_reduce(shared)
    return shared


def gather(value: Any, world: World) -> list[Any]:
    """Gather a small object from each process, in the order of ranks, on every process."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def broadcast_from_main(tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with those of the main process, in one broadcast per dtype."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for group in by_type.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.broadcast(flat, 0)
        sizes = [tensor.numel() for tensor in group]
        for tensor, values in zip(group, flat.split(sizes), strict=True):
            tensor.copy_(values.reshape(tensor.shape))


def from_main(value: Any, world: World) -> Any:
    """Return the main process's value."""
    return gather(value, world)[0]


# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Tolerated growth from fragmentation: 32 MiB above the first batch after the last trim.
SLACK = 2**25
STATM = Path("/proc/self/statm")
LARGEST = 2**30  # bytes: glibc's own limit is 32 MiB, and a batch's activations are larger


def keep_freed_memory() -> bool:
    """Let glibc reuse large blocks; return whether that succeeded.

    By default glibc maps every block above 32 MiB anew and unmaps it when freed, so each
    convolution on a CPU costs thousands of page faults: a frozen encoder of images is 3.2 times
    as fast with it (results/LOG.md). No effect without glibc (macOS, musl).
    """
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


class Heap:
    """Bound the memory that `keep_freed_memory` keeps.

    Batches differ in size (text lengths, missing modalities), so the heap fragments and free memory
    that is not returned grows: on the stamps to 2.4 GB beside 0.35 GB in use. When a batch leaves
    more than `SLACK` above the resident memory of the first batch after the last trim, all free
    memory is returned to the system. Less than `SLACK` in all is not worth it: the next batch would
    map the same pages again, which took 3 % of a training of small models. No effect without glibc.
    """

    def __init__(self) -> None:
        name = ctypes.util.find_library("c")
        self._libc = ctypes.CDLL(name) if name else None
        self._supported = hasattr(self._libc, "malloc_trim") and STATM.is_file()
        self._floor: int | None = None  # resident bytes right after the last trim
        self._usual: int | None = None  # resident bytes that the first batch after it added

    def resident(self) -> int:
        """Return the resident memory of this process in bytes (malloc's own statistics still count
        trimmed blocks)."""
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    def release(self) -> None:
        """Return all free memory to the system."""
        self._libc.malloc_trim(0)  # type: ignore[union-attr]

    def trim(self) -> None:
        """Release free memory, if there may be much, and measure the next batch's growth, say
        before evaluation."""
        if not self._supported:
            return
        if self._floor is None or self.resident() - self._floor > SLACK:
            self.release()
            self._floor = self.resident()
        self._usual = None

    def after_batch(self) -> None:
        """Trim if the resident memory has grown; called after each batch."""
        if not self._supported:
            return
        if self._floor is None:
            self.trim()
        elif self._usual is None:
            self._usual = self.resident() - self._floor
        elif self.resident() - self._floor > self._usual + SLACK:
            self.trim()


def launch_or_join(
    cfg: DistConfig,
    device: str,
    work: Callable[[World], int],
    *,
    script: str,
    args: Sequence[str],
) -> int:
    """Start `cfg.nproc` processes of `script`, or run `work` in this one; return the exit code."""
    if cfg.nproc > 1 and not launched():
        return launch(cfg, script, args)
    keep_freed_memory()
    with process_group(cfg, device) as world:
        return work(world)


def launched() -> bool:
    """Whether a launcher (torchrun, or `launch`) started this process."""
    return "WORLD_SIZE" in os.environ


def launch(cfg: DistConfig, script: str, args: Sequence[str]) -> int:
    """Start `cfg.nproc` processes of `script` on this machine with torchrun; return the exit code.

    Signals are forwarded to the processes, which save and exit; the exit code is theirs.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Each process would otherwise start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // cfg.nproc)))
    options = ["--standalone", f"--nproc-per-node={cfg.nproc}"]
    options += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    try:
        torchrun([*options, "--", script, *args])  # `--`, or torchrun would read our --log
    except ChildFailedError as error:
        return next(iter(error.failures.values())).exitcode
    except SignalException as error:  # torchrun does not report the processes' exit codes here
        return {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}.get(error.sigval, 1)
    return 0


def exit_process(code: int) -> NoReturn:
    """Exit; under torchrun, without interpreter teardown.

    During teardown a torch thread that is still running can abort a successful run ("terminate
    called without an active exception"). The process group is already destroyed and files are
    closed; exit handlers (loader processes, progress bars, loggers) run here.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
