"""FSDP2: each process holds a share of every weight; checkpoints hold whole ones.

Everything here leaves a model that is not sharded as it is. FSDP takes half a second of CPU to
import, so only `shard` does: before that no module and no tensor can be sharded.
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
    """Share out each encoder, and all the rest as one more unit, over the processes.

    The rest (fusion, heads, losses) stays gathered from the forward to the backward pass, for a
    fusion's loss may read its weights. With mixed precision the encoders' weights travel in `amp`
    and gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(amp, torch.float32, cast_forward_inputs=False)
    for encoder in objective.model.encoders.values():  # type: ignore[union-attr, operator]
        if any(True for _ in encoder.parameters()):
            encoder.sharded = True
            fully_shard(encoder, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, reshard_after_forward=False)
    return objective


def sharded(module: nn.Module) -> bool:
    """Whether the weights are shared out."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_share(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is this process's share of a larger one."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def reshard(module: nn.Module) -> None:
    """Forget gathered weights, so that the next forward pass gathers what is there by then."""
    for one in module.modules():
        if sharded(one):
            cast("FSDPModule", one).reshard()


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is shared out; called by all processes."""
    return tensor.full_tensor() if is_share(tensor) else tensor.detach()


def like(full: Tensor, own: Tensor) -> Tensor:
    """Share out a whole tensor as `own` is; called by all processes."""
    if not is_share(own):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(own.device), own.device_mesh, own.placements)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state with whole tensors."""
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_whole(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `whole_state` returned."""
    if not sharded(module):
        module.load_state_dict(state)
        return
    reshard(module)
    own = module.state_dict()
    if own.keys() != state.keys():
        raise FusionZooError(f"other weights: {', '.join(sorted(own.keys() ^ state.keys())[:5])}")
    for name, tensor in own.items():
        tensor.copy_(like(state[name], tensor))


def whole_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimiser's state with whole tensors."""
    state = optimizer.state_dict()
    every = {
        number: {k: whole(x) if isinstance(x, Tensor) else x for k, x in own.items()}
        for number, own in state["state"].items()
    }
    return {**state, "state": every, "kind": type(optimizer).__name__}


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `whole_optimizer` returned; rates, decay and the like stay what they are now.

    Only what a constructor takes is a setting; what else a group holds, some optimisers learnt.
    """
    kind = type(optimizer).__name__
    if state.get("kind", kind) != kind:
        raise ValueError(f"its optimiser is {state['kind']}, not {kind}")
    settings = {"base_lr", *inspect.signature(type(optimizer)).parameters} - {"params"}
    now = [{k: group[k] for k in settings & group.keys()} for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    every = {
        number: {
            k: like(x, parameters[number]) if _of_shape(x, parameters[number]) else x
            for k, x in own.items()
        }
        for number, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": every})
    for group, own in zip(optimizer.param_groups, now, strict=True):
        group.update(own)


def _of_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
