"""Process-group set-up and collectives."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fusionzoo.config import DistConfig
from fusionzoo.errors import FusionZooError

# Buffers of an Objective that no forward pass in training mode reads (running statistics), or that
# are constant.
RARELY_SHARED = ("model.encoders.", "heads.", "tasks.")


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


@contextmanager
def process_group(cfg: DistConfig, device: str = "auto") -> Iterator[World]:
    """Join the other processes, if there are any; leave them on every way out.

    Reads RANK, WORLD_SIZE and LOCAL_RANK (torchrun, SLURM wrappers), else `cfg.rank` and
    `cfg.world_size`. `backend="auto"` is NCCL where each process has a GPU, else gloo.
    """
    rank = int(os.environ.get("RANK", cfg.rank or 0))
    size = int(os.environ.get("WORLD_SIZE", cfg.world_size or 1))
    local = int(os.environ.get("LOCAL_RANK", rank))
    where = pick_device(device, local)
    if size == 1:
        yield World(0, 1, where)
        return
    if cfg.strategy not in ("ddp", "fsdp"):
        raise FusionZooError(
            f"--dist.strategy {cfg.strategy} is for one process, and this is one of {size}:"
            " use ddp or fsdp, or start it without torchrun"
        )
    backend = pick_backend(cfg.backend, where)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    # With env:// the rank stands in the environment, and torch reads it there.
    numbered: dict[str, Any] = {}
    if cfg.init_method != "env://":
        numbered = {"rank": rank, "world_size": size}
    try:
        dist.init_process_group(
            backend, init_method=cfg.init_method, timeout=timedelta(seconds=cfg.timeout), **numbered
        )
    except (ValueError, RuntimeError, dist.DistError) as error:
        raise FusionZooError(
            f"process {rank} of {size} cannot join the others by {cfg.init_method}: {error}"
        ) from error
    world = World(rank, size, where)
    try:
        yield world
    except RuntimeError as error:
        lost = _lost(error, world, cfg.timeout)
        if lost is None:
            raise
        raise lost from error
    finally:
        gc.collect()  # a DDP module in a reference cycle must not outlive its group
        dist.destroy_process_group()


def _lost(error: RuntimeError, world: World, timeout: float) -> FusionZooError | None:
    """Say in one line that another process is gone or hangs; None for any other error."""
    text = str(error)
    if not (isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text):
        return None
    late = "imed out" in text or "imeout" in text
    what = f"did not answer within {timeout:g} s" if late else "ended"
    return FusionZooError(
        f"process {world.rank} of {world.size}: another process {what} (its own message says why,"
        f" --dist.timeout sets the wait); --resume goes on from the last checkpoint."
        f" [{text.splitlines()[0]}]"
    )


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Resolve `auto`: this process's own GPU where there is one, else the CPU."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise FusionZooError(f"--device {wanted!r} is none: auto, cpu, cuda or cuda:1") from None
    if device.type != "cuda":
        return device
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise FusionZooError(
            f"--device {wanted}: process {local_rank} would need GPU {index}, and there are"
            f" {torch.cuda.device_count()} here"
        )
    return torch.device("cuda", index)


def pick_backend(wanted: str, device: torch.device) -> str:
    """Resolve `auto` and refuse what this torch was built without."""
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if not getattr(dist, f"is_{wanted}_available")():
        raise FusionZooError(f"this torch was built without {wanted}: --dist.backend auto works")
    if wanted == "nccl" and device.type != "cuda":
        raise FusionZooError("--dist.backend nccl needs a GPU for each process: use gloo")
    return wanted


def wrap(
    module: nn.Module, cfg: DistConfig, world: World, amp: torch.dtype | None = None
) -> nn.Module:
    """Wrap `module` for the chosen strategy; the state dict stays that of `module` itself.

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
        from .fsdp import shard

        return shard(module, world.device, amp)
    ids = [world.device.index] if world.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel
    # DDP would broadcast them before every forward pass; `Stepper.share_statistics` does so rarely.
    names = [name for name, _ in module.named_buffers() if name.startswith(RARELY_SHARED)]
    ddp._set_params_and_buffers_to_ignore_for_model(module, names)
    return ddp(module, device_ids=ids, gradient_as_bucket_view=True)


def seed_everything(seed: int) -> None:
    """Seed every generator that training draws from."""
    random.seed(seed)
    torch.manual_seed(seed)


def total(values: Tensor, world: World) -> Tensor:
    """Sum `values` over the processes; the same on all of them."""
    if world.size == 1:
        return values
    shared = values.to(world.device)  # NCCL sums what is on its GPU
    dist.all_reduce(shared)
    return shared


def gather(value: Any, world: World) -> list[Any]:
    """Collect a small object of each process, in the order of ranks, on all of them."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def share(tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` by those of the main process, in one broadcast for each type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        flat = torch.cat([tensor.flatten() for tensor in same])
        dist.broadcast(flat, 0)
        sizes = [tensor.numel() for tensor in same]
        for tensor, values in zip(same, flat.split(sizes), strict=True):
            tensor.copy_(values.reshape(tensor.shape))


def from_main(value: Any, world: World) -> Any:
    """Return what the main process has."""
    return gather(value, world)[0]
