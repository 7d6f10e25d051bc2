"""`--device`: which GPU is taken, and what the path of a run asks of one; no GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusionzoo import structures
from fusionzoo.config import DistConfig
from fusionzoo.datasets.loader import make_loader
from fusionzoo.errors import FusionZooError, is_out_of_memory
from fusionzoo.machine.devices import (
    gpu_random_state,
    num_cores,
    pick_device,
    same_randomness,
    set_gpu_random_state,
)
from fusionzoo.machine.distributed import process_group
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch
from fusionzoo.training.objective import Objective
from fusionzoo.training.trainer import Trainer

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that the machine has these GPUs: `machine(xpu=2)`."""

    def pretend(**counts: int) -> None:
        for kind in ("cuda", "xpu"):
            count = counts.get(kind, 0)
            module = getattr(torch, kind)
            monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
            monkeypatch.setattr(module, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: counts.get("mps", 0) > 0)

    return pretend


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({}, "cpu"),
        ({"cuda": 1}, "cuda:0"),
        ({"xpu": 2}, "xpu:0"),
        ({"mps": 1}, "mps:0"),
        ({"cuda": 1, "xpu": 1}, "cuda:0"),
    ],
)
def test_auto_takes_the_gpu_that_torch_has(
    machine: Machine, gpus: dict[str, int], expected: str
) -> None:
    machine(**gpus)
    assert pick_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["cuda", "xpu", "xpu:1", "mps"])
def test_a_gpu_that_is_not_there_is_refused_in_one_line(machine: Machine, name: str) -> None:
    machine(xpu=1 if name == "xpu:1" else 0)
    with pytest.raises(FusionZooError, match=f"--device {name}: .*--device auto takes what there"):
        pick_device(name)


def test_several_processes_take_cuda_or_the_cpu(machine: Machine) -> None:
    machine(mps=1)
    assert pick_device("auto", 0, num_processes=2) == torch.device("cpu")
    with pytest.raises(FusionZooError, match="--device mps is for one process"):
        pick_device("mps", 0, num_processes=2)


def test_what_a_device_lacks_is_said_in_one_line(machine: Machine) -> None:
    machine(mps=1)
    with pytest.raises(FusionZooError, match=r"float64, which an mps GPU lacks.*--device cpu"):  # noqa: SIM117
        with process_group(DistConfig()):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    with pytest.raises(TypeError, match="another"):  # noqa: SIM117
        with process_group(DistConfig()):
            raise TypeError("another")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_random_states_and_waiting_go_through_the_devices_own_module(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    calls: list[tuple[Any, ...]] = []
    number = () if kind == "mps" else (torch.device(kind, 0),)  # torch.mps has one GPU

    def get(*args: Any) -> Tensor:
        calls.append(("get", *args))
        return torch.tensor(3)

    monkeypatch.setattr(getattr(torch, kind), "get_rng_state", get)
    monkeypatch.setattr(
        getattr(torch, kind), "set_rng_state", lambda state, *args: calls.append(("set", *args))
    )
    device = torch.device(kind, 0)
    set_gpu_random_state(gpu_random_state(device), device)
    with same_randomness(device):
        torch.rand(2)
    names = ["get", "set", "get", "set"]
    assert calls == [(name, *number) for name in names]


def test_the_cpu_has_no_state_of_its_own_beside_torchs() -> None:
    before = torch.get_rng_state()
    with same_randomness(torch.device("cpu")):
        torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert gpu_random_state(torch.device("cpu")) is None


@pytest.mark.parametrize(("kind", "asynchronous"), [("cuda", True), ("xpu", False), ("mps", False)])
def test_only_cuda_copies_asynchronously_and_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, asynchronous: bool
) -> None:
    copies: list[bool] = []

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        copies.append(non_blocking)
        return tensor

    monkeypatch.setattr(Tensor, "to", to)
    device = torch.device(kind, 0)
    Batch(["a"], {"x": {"x": torch.zeros(1)}}, torch.ones(1, 1), None).to(device)
    assert set(copies) == {asynchronous}
    assert make_loader([0], [[0]], list, device=device).pin_memory is asynchronous


def test_out_of_memory_is_known_on_every_device() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("sizes do not match"))


def test_a_full_gpu_is_one_line_before_training_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Objective, device: torch.device) -> Objective:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80"
            " GiB of which 1.06 MiB is free. Process 7 has 139 GiB memory in use."
        )

    monkeypatch.setattr(Objective, "to", full)
    data = ["interactions", "--data.samples", "100", "--device", "cpu", "--log", "none"]
    assert train([*data, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")
    assert "MiB is free. Where other programs hold a GPU's memory" in error


class _NoFloat64(TorchFunctionMode):
    """Refuse to convert a tensor to float64, as mps does; a new one is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (Tensor.double, Tensor.to) and out.dtype == torch.float64:
            raise TypeError(f"{func} makes a tensor of float64")
        return out


@pytest.mark.parametrize("balance", ["", "contrastive_align"])  # one loss, and several
def test_steps_need_no_float64_on_a_device_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, balance: str
) -> None:
    called = []

    def guard(name: str) -> None:
        method = getattr(Trainer, name)

        def guarded(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            with _NoFloat64():
                return method(self, *args, **kwargs)

        monkeypatch.setattr(Trainer, name, guarded)

    guard("step")
    guard("mean_loss")
    monkeypatch.setattr(structures, "LACK_FLOAT64", ("cpu",))
    data = ["interactions", "--data.samples", "200", "--log", "none", "--device", "cpu"]
    run = [*data, "--train.max_steps", "3", f"--balance={balance}", "--out", str(tmp_path / "run")]
    assert train(run) == 0
    assert called.count("step") == 3
    assert "mean_loss" in called


def test_cores_are_counted_where_no_process_is_tied_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr("os.sched_getaffinity")
    assert num_cores() == os.cpu_count()
