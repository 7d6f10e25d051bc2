"""Several processes as one run: launch, process group, collectives."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fusionzoo.config import DistConfig
from fusionzoo.errors import FusionZooError, explained

from .devices import num_cores, pick_device
from .memory import keep_freed_memory
from .processes import end_with_launcher, launched

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
    problem = f"process {rank} of {size} cannot join the others by {cfg.init_method}"
    with explained(problem, ValueError, RuntimeError, dist.DistError):
        timeout = timedelta(seconds=cfg.timeout)
        dist.init_process_group(
            backend, init_method=cfg.init_method, timeout=timeout, **rank_arguments
        )
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
        from fusionzoo.machine.fsdp import shard

        return shard(module, world.device, amp)
    ids = [world.device.index] if world.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel
    # DDP would broadcast them before every forward pass; `Trainer.share_statistics` does so rarely.
    names = [name for name, _ in module.named_buffers() if name.startswith(RARELY_SHARED)]
    ddp._set_params_and_buffers_to_ignore_for_model(module, names)
    return ddp(module, device_ids=ids, gradient_as_bucket_view=True)


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
    return gather(value if world.main else None, world)[0]


def on_main(action: Callable[[], Any], world: World) -> Any:
    """Return what `action` returns on the main process; where that fails, every process raises."""
    result = problem = None
    if world.main:
        try:
            result = action()
        except (FusionZooError, OSError) as error:
            problem = str(error)
    result, problem = from_main((result, problem), world)
    if problem is not None:
        raise FusionZooError(problem)
    return result


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
        codes = {"SIGINT": 130, "SIGTERM": 75, "SIGUSR1": 75}
        return codes.get(signal.Signals(error.sigval).name, 1)
    return 0


def gathered(x: Tensor, world: World) -> Tensor:
    """Gather the rows of all processes; only this process's rows carry a gradient.

    (B, ...) -> (sum of B, ...). Every process then computes the full loss and its gradient with
    respect to its own rows. The backward pass needs no communication, which could interleave with
    DDP's collectives in a different order on each process. Training averages gradients over the
    processes, so the gradient of the local rows is scaled up by the number of processes; that of
    parameters applied to all rows on every process, such as a temperature, is correct unscaled.
    """
    if world.size == 1:
        return x
    counts = torch.zeros(world.size, dtype=torch.int64, device=x.device)
    counts[world.rank] = len(x)
    sizes = total(counts, world).tolist()
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x.detach()
    padded_by_rank = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(padded_by_rank, padded)
    rows_by_rank = [y[:size] for y, size in zip(padded_by_rank, sizes, strict=True)]
    rows_by_rank[world.rank] = x.detach() + world.size * (x - x.detach())
    return torch.cat(rows_by_rank)


def gathered_rows(
    rows: dict[str, Tensor], present: Tensor, world: World
) -> tuple[dict[str, Tensor], Tensor]:
    """Gather vectors (B, D) of each modality and presence (B, M) in one collective."""
    widths = [x.shape[1] for x in rows.values()]
    bits = present.to(next(iter(rows.values())))
    *parts, bits = gathered(torch.cat([*rows.values(), bits], dim=1), world).split(
        [*widths, present.shape[1]], dim=1
    )
    return dict(zip(rows, parts, strict=True)), bits > 0.5
