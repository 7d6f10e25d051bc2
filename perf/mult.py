"""Time a step of `mult` against the same stacks one after the other, a module for each.

`python perf/mult.py`. Bar: at most half of the CPU time with six views of one token (batch
32), and logits equal to 1e-6 in double precision, with and without missing modalities. With
different numbers of tokens nothing can be shared, and the ratio is about 1. Prints one JSON line
for each case; CPU time of the process, so that other load does not count.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusionzoo.fusion import create_fusion
from fusionzoo.fusion.attention._stacks import Stacks
from fusionzoo.fusion.attention.mult import MulT, last_step, with_positions
from fusionzoo.structures import Features

BATCH, VIEWS, WIDTH, ROUNDS = 32, 6, 16, 9
Given = dict[str, Features]


class Block(nn.Module):
    """One pre-norm block of one stack."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None) -> Tensor:
        queries = self.norm(x)
        keys = queries if context is None else self.norm(context)
        any_key = mask.any(1)[:, None]
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.query(queries), *self.key_value(keys).chunk(2, -1))
        )
        visible = (mask | ~any_key)[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
        x = x + self.dropout(self.out(mixed.flatten(2)).where(any_key[..., None], 0))
        return x + self.dropout(self.narrow(self.wide(self.mlp_norm(x)).relu()))


class Stack(nn.Module):
    """Blocks and a final norm, with the weights of number `row` of several stacks."""

    def __init__(self, stacks: Stacks, row: int) -> None:
        super().__init__()
        *layers, last = stacks.weights()
        dim = last["norm"].shape[-1]
        blocks = [Block(dim, stacks.num_heads, stacks.dropout.p) for _ in layers]
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(dim)
        for module, part in zip((*blocks, self), (*layers, last), strict=True):
            names = {name.removesuffix("_bias") for name in part}
            state = {
                f"{name}.weight": part[name][row, 0] if "norm" in name else part[name][row].mT
                for name in names
            }
            state |= {f"{name}.bias": part[f"{name}_bias"][row, 0] for name in names}
            module.load_state_dict(state, strict=module is not self)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask, context)
        return self.norm(x)


class Loops(nn.Module):
    """The stacks of a `mult` in loops."""

    def __init__(self, fusion: MulT) -> None:
        super().__init__()
        assert fusion.crossmodal is not None
        self.fusion, self.pairs = fusion, fusion.pairs
        self.crossmodal = nn.ModuleList(
            Stack(fusion.crossmodal, row) for row in range(len(self.pairs))
        )
        self.memory = nn.ModuleDict({m: Stack(x, 0) for m, x in fusion.memory.items()})  # type: ignore[arg-type]
        self.rest = nn.ModuleList([fusion.embed, fusion.mlp, fusion.join, fusion.head])

    def forward(self, features: Mapping[str, Features]) -> Tensor:
        fusion = self.fusion
        masks = {name: features[name].mask for name in fusion.dims}
        tokens = {
            n: with_positions(fusion.embed[n](x), masks[n])
            for n, x in fusion.tokens(features).items()
        }
        last = []
        for name, mask in masks.items():
            streams = [
                stack(tokens[m], masks[n], tokens[n])
                for stack, (n, m) in zip(self.crossmodal, self.pairs, strict=True)
                if m == name
            ]
            stream = self.memory[name](with_positions(torch.cat(streams, -1), mask), mask)
            last.append(last_step(stream, mask))
        joined = torch.cat(last, -1)
        present = fusion.present(features)
        joined = torch.cat([joined + fusion.mlp(joined), present.to(joined.dtype)], -1)
        return fusion.head(fusion.or_null(fusion.join(joined), present))


def inputs(counts: list[int], present: float, dtype: torch.dtype) -> Given:
    """Make features of `counts` tokens, each modality present with probability `present`."""
    made = {}
    for number, count in enumerate(counts):
        here = torch.rand(BATCH, 1) < present
        tokens = torch.randn(BATCH, count, WIDTH, dtype=dtype)
        made[f"view{number}"] = Features(tokens, here.expand(-1, count), tokens.mean(1))
    return made


def step(module: nn.Module, answer: Callable[[], Tensor]) -> float:
    """Return the CPU seconds of one forward and backward pass."""
    start = time.process_time()
    module.zero_grad(set_to_none=True)
    answer().square().sum().backward()
    return time.process_time() - start


def case(counts: list[int]) -> dict[str, float | list[int]]:
    """Compare outputs and time for one number of tokens of each view."""
    fusion = create_fusion("mult", {f"view{i}": WIDTH for i in range(len(counts))}, 32, 10)
    assert isinstance(fusion, MulT)
    with torch.no_grad():
        for parameter in fusion.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    loops = Loops(fusion)
    fusion.double().eval(), loops.double().eval()
    off = {
        share: (fusion(x).logits - loops(x)).abs().max().item()
        for share in (1.0, 0.6)
        if (x := inputs(counts, share, torch.float64))
    }
    assert max(off.values()) < 1e-6, off
    fusion.float().train(), loops.float().train()
    given = inputs(counts, 1.0, torch.float32)
    times = [
        (step(fusion, lambda: fusion(given).logits), step(loops, lambda: loops(given)))
        for _ in range(ROUNDS)
    ]
    return {
        "tokens": counts,
        "batched_ms": 1e3 * statistics.median(a for a, _ in times),
        "loops_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(a / b for a, b in times),
        "difference": off[1.0],
        "difference_with_missing": off[0.6],
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for counts in ([1] * VIEWS, [8] * VIEWS, [*range(5, 5 + VIEWS)]):
        print(json.dumps(case(counts)))


if __name__ == "__main__":
    main()
