"""FSDP2: shard the weights over the processes; gather full tensors for checkpoints.

All functions also accept a model that is not sharded. Importing FSDP takes half a second of CPU, so
only `shard` imports it; until then nothing can be sharded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusionzoo.errors import FusionZooError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def shard(objective: nn.Module, device: torch.device, amp: torch.dtype | None) -> nn.Module:
    """Shard each encoder as a unit of its own, and fusion, heads and losses as one more unit.

    That last unit stays gathered from the forward to the backward pass, because a fusion's loss may
    read its weights. In mixed precision the encoders' weights are all-gathered in `amp`, and their
    gradients are reduced in float32; otherwise in the weights' own precision.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    reduced = None if amp is None else torch.float32
    policy = MixedPrecisionPolicy(amp, reduced, cast_forward_inputs=False)
    for encoder in objective.model.encoders.values():  # type: ignore[union-attr, operator]
        if any(True for _ in encoder.parameters()):
            encoder.sharded = True
            fully_shard(encoder, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, reshard_after_forward=False)
    return objective


def sharded(module: nn.Module) -> bool:
    """Whether the module's weights are sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is this process's shard of a larger one."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def reshard(module: nn.Module) -> None:
    """Drop gathered weights, so that the next forward pass gathers the current ones."""
    for submodule in module.modules():
        if sharded(submodule):
            cast("FSDPModule", submodule).reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; called by all processes."""
    return tensor.full_tensor() if is_shard(tensor) else tensor.detach()


def shard_like(full: Tensor, sharded_tensor: Tensor) -> Tensor:
    """Shard a full tensor as `sharded_tensor` is; called by all processes."""
    if not is_shard(sharded_tensor):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        full.to(sharded_tensor.device), sharded_tensor.device_mesh, sharded_tensor.placements
    )


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state dict with full tensors."""
    return {name: full_tensor(tensor) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict of full tensors."""
    if not sharded(module):
        module.load_state_dict(state)
        return
    reshard(module)
    local_state = module.state_dict()
    if local_state.keys() != state.keys():
        names = sorted(local_state.keys() ^ state.keys())
        raise FusionZooError(f"the names of the weights differ: {', '.join(names[:5])}")
    for name, tensor in local_state.items():
        tensor.copy_(shard_like(state[name], tensor))


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimiser's state dict with full tensors."""
    state = optimizer.state_dict()
    state_by_parameter = {
        number: {k: full_tensor(x) if isinstance(x, Tensor) else x for k, x in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": state_by_parameter, "kind": type(optimizer).__name__}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `full_optimizer_state` returned, but keep the current settings (rates, decay, ...).

    A setting is a key that the optimiser's constructor takes; other keys of a group are state.
    """
    kind = type(optimizer).__name__
    if state.get("kind", kind) != kind:
        raise ValueError(f"its optimiser is {state['kind']}, not {kind}")
    settings = {"base_lr", *inspect.signature(type(optimizer)).parameters} - {"params"}
    current = [{k: group[k] for k in settings & group.keys()} for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state_by_parameter = {
        number: {
            k: shard_like(x, parameters[number]) if _of_shape(x, parameters[number]) else x
            for k, x in values.items()
        }
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": state_by_parameter})
    for group, group_settings in zip(optimizer.param_groups, current, strict=True):
        group.update(group_settings)


def _of_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
