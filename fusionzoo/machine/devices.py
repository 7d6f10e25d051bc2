"""CPUs and GPUs: which there are, which is used, their random states."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError

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
