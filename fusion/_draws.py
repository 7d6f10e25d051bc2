"""Random numbers for fusions that draw in training, from a generator of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributed, nn

# The constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit integers.
INCREMENT, FIRST, SECOND = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)
BITS = 23  # of a uniform number: its middle values are exact in float32


class Draws(nn.Module):
    """Draw random numbers that depend on no other draw, and that a checkpoint restores.

    Number i of call n is splitmix64 of the seed, n, the process and i. It is computed by tensor
    operations on the device: equal on all devices, without a generator to copy or to synchronise.
    The seed is drawn when the module is built.
    """

    state: Tensor  # (2,) int64: the seed, and the number of calls so far

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "state", torch.cat([torch.randint(2**62, (1,)), torch.zeros(1).long()])
        )

    def uniform(self, *shape: int) -> Tensor:
        """Draw float32 numbers between 0 and 1, both excluded."""
        seed, calls = self.state.unbind()
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        stream = _mix(_mix(seed + calls * INCREMENT) + rank * INCREMENT)
        self.state[1] += 1
        index = torch.arange(1, math.prod(shape) + 1, device=self.state.device)
        bits = _shift(_mix(stream + index * INCREMENT), 64 - BITS)
        return ((bits.float() + 0.5) * 2.0**-BITS).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Draw float32 numbers from the standard normal distribution (Box and Muller 1958)."""
        radius, angle = self.uniform(2, *shape).unbind()
        return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mix(x: Tensor) -> Tensor:
    """Return the finaliser of splitmix64; products wrap around."""
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; `>>` fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
