"""Seeds for random generators: one way to mix numbers and words into a seed."""

from __future__ import annotations

from zlib import crc32

MASK = (1 << 64) - 1
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def seed_of(*parts: int | str) -> int:
    """Return a seed from 1 to 2^63 - 1 that depends on every part and on their order.

    The same in every process and on every machine. A word counts by its CRC-32; the sum of the
    parts, each times a factor of its own, goes through the finaliser of splitmix64 (Steele, Lea and
    Flood 2014).

    >>> seed_of(0, 1, 2) != seed_of(0, 2, 1)
    True
    """
    mixed = 0
    for place, part in enumerate(parts):
        number = crc32(part.encode()) if isinstance(part, str) else part
        factor = FACTORS[place % 3] * (2 * (place // 3) + 1)
        mixed = (mixed + number * factor) & MASK
    for shift, factor in ((30, FACTORS[1]), (27, FACTORS[2])):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & MASK
    return (mixed ^ (mixed >> 31)) >> 1 or 1
