"""Parameters and multiply-accumulates are the closed forms of the catalogue."""

from __future__ import annotations

import pytest

from fusionzoo.evaluation.cost import (
    STANDARD,
    STANDARD_DIM,
    STANDARD_OUTPUTS,
    cost,
    standard_fusion,
)

# The standard case in the catalogue's letters.
T, D = zip(*STANDARD.values(), strict=True)
M, N, S = len(D), sum(T), sum(D)
d, C = STANDARD_DIM, STANDARD_OUTPUTS
HEAD, NULL, ALIGN = d * C + C, d, S * d + M * d
TB, XB = 12 * d * d + 13 * d, 12 * d * d + 15 * d
ENDS = HEAD + NULL
TOKENS = ALIGN + M * d + 2 * d + ENDS  # aligner, modality embeddings, last norm
IN = sum(t * w * d for t, w in STANDARD.values())  # aligning the tokens
LATE = ALIGN + M * HEAD + C + NULL
DIRECT = S * C + M * C + C + NULL  # late, without a projection
R = 16  # latents


def block(n: int, width: int = d) -> int:
    """MACs of a self-attention block over n tokens."""
    return 12 * n * width**2 + 2 * n * n * width


def cross(queries: int, keys: int, width: int = d) -> int:
    """MACs of a cross-attention block."""
    return 10 * queries * width**2 + 2 * keys * width**2 + 2 * queries * keys * width


def pooling(queries: int, keys: int) -> int:
    """MACs of an attention layer alone."""
    return 2 * queries * d**2 + 2 * keys * d**2 + 2 * queries * keys * d


def mult() -> tuple[int, int]:
    w, wide = 30, 30 * (M - 1)
    total = M * wide
    parameters = S * w + M * (M - 1) * (2 * (12 * w * w + 13 * w) + 2 * w)
    parameters += M * (2 * (12 * wide * wide + 13 * wide) + 2 * wide)
    parameters += 2 * (total * total + total) + (total + M) * d + d + ENDS
    macs = sum(t * width * w for t, width in STANDARD.values())
    macs += sum(2 * cross(T[m], T[n], w) for m in range(M) for n in range(M) if n != m)
    macs += sum(2 * block(t, wide) for t in T) + 2 * total**2 + (total + M) * d + d * C
    return parameters, macs


OUTER = 33**3
FORMULAS: dict[str, tuple[int, int]] = {
    "concat": ((S + M) * 128 + 128 + 128 * d + d + ENDS, (S + M) * 128 + 128 * d + d * C),
    **dict.fromkeys(("sum", "mean", "max", "embracenet"), (ALIGN + ENDS, S * d + d * C)),
    "gmu": (S * d + (M * d) ** 2 + ENDS, S * d + (M * d) ** 2 + d * C),
    "film": (D[0] * d + 2 * d + sum(2 * d * w + 2 * d for w in D[1:]) + ENDS,
        D[0] * d + 2 * d * sum(D[1:]) + d * C),
    "multiplicative": (16 * S + 16 * M + 17**3 * d + ENDS,
        16 * S + (17**3 + 17**2 + 17) * d + d * C),
    "mlb": (1200 * (S + M) + 1200 * d + d + ENDS, 1200 * S + 1200 * d + d * C),
    "mfb": (5000 * (S + M) + 1000 * d + d + ENDS, 5000 * S + 1000 * d + d * C),
    "mfh": (2 * 5000 * (S + M) + 2000 * d + d + ENDS, 2 * 5000 * S + 2000 * d + d * C),
    "mutan": (360 * (S + M) + M * (360 * 360 * 10 + 3600) + 360 * d + d + ENDS,
        360 * S + M * 360 * 360 * 10 + 360 * d + d * C),
    "block": (1600 * (S + M) + M * 20 * (80 * 80 * 15 + 80 * 15) + 1600 * d + d + ENDS,
        1600 * S + M * 20 * 80 * 80 * 15 + 1600 * d + d * C),
    "mcb": (16384 * d + d + ENDS, 16384 * d + d * C),
    "tfn": (32 * (S + M) + OUTER * 128 + 128 + 128 * 128 + 128 + 128 * d + d + ENDS,
        32 * S + 33**2 + 33**3 + OUTER * 128 + 128 * 128 + 128 * d + d * C),
    "lmf": (4 * d * (S + M) + 4 + d + ENDS, 4 * d * (S + M) + 4 * d + d * C),
    "mmdynamics": (sum(w * w + w for w in D) + ALIGN + M * (d + 1 + HEAD) + M * d * C + C + NULL,
        sum(w * w for w in D) + S * d + M * (d + d * C) + M * d * C),
    "hpfn": (3 * 4 * d * (S + 1) + ENDS, 3 * 4 * d * (S + 1) + d * C),
    "mmtm": (2 * S * (S // 2) + S // 2 + S + ALIGN + ENDS, 2 * S * (S // 2) + S * d + d * C),
    **dict.fromkeys(("late_mean", "late_max", "late_vote", "late_confidence", "ume"),
        (LATE, S * d + M * d * C)),
    **dict.fromkeys(("qmf", "tmc", "ecml", "dbf"), (DIRECT, S * d + S * C)),
    "pdf": (DIRECT + 2 * S * d + M * (2 * d * d + 4 * d + 1),
        S * d + S * C + 2 * S * d + M * (2 * d * d + d)),
    "simmlm": (LATE + (M * d + M) * 256 + 256 + 257 * M * C,
        S * d + M * d * C + (M * d + M) * 256 + 256 * M * C),
    "late_weighted": (LATE + M, S * d + M * d * C),
    "late_poe": (LATE - C, S * d + M * d * C),
    "late_stacking": (5 * ALIGN + 5 * M * HEAD + M * (C + 1) * C + C + NULL,
        5 * S * d + 5 * M * d * C + M * (C + 1) * C),
    "attn_pool": (ALIGN + 2 * (d * 128 + 128) + 128 + ENDS,
        S * d + M * (2 * d * 128 + 128) + d * C),
    "concat_transformer": (TOKENS + d + 2 * TB, IN + 2 * block(N + 1) + d * C),
    "co_attention": (
        TOKENS + 2 * M * (16 * d * d + 19 * d) + M * (d + 1) * d + d,
        IN + M * (d + 1) * d + d * C
        + 2 * sum(14 * t * d * d + 2 * (N - t) * d * d + 2 * t * N * d for t in T),
    ),
    "cross_attention": (TOKENS + d + 2 * XB, IN + 2 * cross(T[0], N - T[0]) + d * C),
    "mult": mult(),
    "mbt": (TOKENS + 4 * d + M * 4 * TB,
        IN + sum(2 * block(t) + 2 * block(t + 4) for t in T) + d * C),
    "perceiver": (TOKENS + R * d + 2 * (XB + TB), IN + 2 * (cross(R, N) + block(R)) + d * C),
    "qformer": (TOKENS + 32 * d + 16 * d * d + 21 * d + TB,
        IN + 2 * block(32) + 2 * 32 * d * d + 2 * N * d * d + 2 * 32 * N * d + d * C),
    "gated_xattn": (TOKENS + d + R * d + 12 * d * d + 6 * d + 2 * (12 * d * d + 4 * d + 2),
        IN + cross(R, N - T[0] + R) + 2 * cross(T[0], R) + d * C),
    "fuse_moe": (TOKENS + 4 * d * d + 8 * d + 16 * d + 16 * (8 * d * d + 5 * d),
        IN + 4 * N * d * d + 2 * N * N * d + 4 * N * 8 * d * d + d * C),
    "flex_moe": (  # its attention and router also run over the 4 tokens that stand in for each
        TOKENS + 7 * M * 4 * d + 4 * d * d + 8 * d + 16 * d + 16 * (8 * d * d + 5 * d),
        IN + 4 * (N + 12) * d * d + 2 * (N + 12) ** 2 * d + (N + 12) * 16 * d
        + 4 * N * 8 * d * d + d * C,
    ),
    "healnet": (
        16 * d + 2 * (S * (2 + 2 * 256) + M * (2 * 256 * d + 5 * d + 12 * d * d + 9 * d))
        + 2 * d + ENDS,
        2 * (
            2 * IN // d * 256 + M * (2 * 16 * d * 256 + 12 * 16 * d * d) + 2 * 16 * N * 256
        ) + d * C,
    ),
    "multiway": (TOKENS + 2 * (4 * d * d + 6 * d + M * (8 * d * d + 7 * d)) + 2 * TB,
        IN + 4 * block(N) + d * C),
    "momke": (
        ALIGN + M * 4 * (5 * d * d + 5 * d) + M * (d * d + d + d * M + M)
        + (M * d) ** 2 + M * d + M * d * d + d + M * HEAD + ENDS,
        IN + M * 4 * (5 * N * d * d + 2 * N * N * d) + N * d * d + N * d * M
        + (M * d) ** 2 + M * d * d + M * d * C + d * C,
    ),
    "zorro": (TOKENS + 16 * d + 2 * TB + (M + 1) * d + 4 * d * d + 4 * d,
        IN + 2 * block(N + 16) + pooling(M + 1, N + 16) + (M + 1) * d * C),
    "mca": (TOKENS + 16 * d + 2 * TB + (M + 4) * d + 4 * d * d + 4 * d,
        IN + 2 * block(N + 16) + pooling(M + 4, N + 16) + (M + 5) * d * C),
    "i2moe": (
        ALIGN + 5 * ((S + M) * 128 + 128 + 128 * d + d + ENDS) + (M * d + M) * 256 + 256 + 257 * 5,
        S * d + 5 * ((S + M) * 128 + 128 * d + d * C) + (M * d + M) * 256 + 256 * 5),
    "misa": (
        ALIGN + (2 * M + 1) * (d * d + d) + TB + 2 * M * d * 3 * d + 3 * d + 3 * d * d + d + ENDS,
        S * d + 2 * M * d * d + block(2 * M) + 2 * M * d * 3 * d + 3 * d * d + d * C),
    "drfuse": (2 * ALIGN + 5 * d * d + 4 * d + (2 + C) * (d * d + d) + (M + 1) * HEAD + ENDS,
        2 * S * d + M * 5 * d * d + (M + 1) * (2 + C) * d * d + C * (M + 1) * d + (M + 1) * d * C),
    "dynmm": (  # of all branches, as in training; a prediction runs a row through one
        LATE + M * d * d + d + HEAD + (M * d + M) * 128 + 128 + 129 * 4,
        S * d + M * d * C + M * d * d + d * C + (M * d + M) * 128 + 128 * 4,
    ),
    "multimodn": (d + S * 32 + M * 32 + M * ((32 + d) * d + d) + HEAD,
        S * 32 + M * (32 + d) * d + (M + 1) * d * C),
    "medfuse": (ALIGN + 8 * d * d + 8 * d + ENDS, S * d + M * 8 * d * d + d * C),
    "mvae_poe": (2 * S * d + M * 2 * d + HEAD, 2 * S * d + d * C),
    "missing_tokens": (ALIGN + M * d + (M * d * d + M * d) + M * d + d + 2 * TB + 2 * d + ENDS,
        IN + S * d + (N + M) * d * d + 2 * block(N + M + 1) + d * C),
    "shaspec": (
        ALIGN + (M + 1) * 2 * (d * d + d) + 2 * d * d + d + d * M + M
        + M * d * d + d + d * d + d + ENDS,
        S * d + M * 6 * d * d + M * d * d + d * d + d * C,
    ),
    "mmin": (ALIGN + 2 * 5 * (2 * M * d * 128 + 128 + M * d) + M * d * d + d + d * d + d + ENDS,
        S * d + 5 * 2 * M * d * 128 + M * d * d + d * d + d * C),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_parameters_and_macs_are_the_closed_forms(name: str) -> None:
    parameters, macs = FORMULAS[name]
    found = cost(standard_fusion(name), STANDARD)
    assert found.parameters == parameters
    assert found.macs == pytest.approx(macs, rel=0.02)


@pytest.mark.parametrize("name", ["mbt", "perceiver", "attn_pool", "gmu", "lmf", "concat"])
def test_four_times_the_tokens_cost_at_most_four_and_a_half_times(name: str) -> None:
    longer = {m: (4 * count, width) for m, (count, width) in STANDARD.items()}
    fusion = standard_fusion(name)
    assert cost(fusion, longer).macs <= 4.5 * cost(fusion, STANDARD).macs
