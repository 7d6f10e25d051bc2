"""Random changes of texts: drop words, swap neighbours, typing errors."""

from __future__ import annotations

from collections.abc import Collection

import torch

OPERATIONS = ("drop", "swap", "typos")

DROP, SWAP, TYPO = 0.2, 0.1, 0.1  # probability per word at strength 1


def change_text(
    text: str, strength: float, operations: Collection[str], generator: torch.Generator
) -> str:
    """Drop words (never all), swap neighbouring ones and misspell some.

    A text in which nothing is drawn stays as it is, its white space too. Words are what white space
    separates; a text without any is one word, which can only be misspelt.
    """
    words = text.split()
    if not words:
        return text
    drop, swap, typo, place = torch.rand(4, len(words), generator=generator).tolist()
    changed = words
    if "typos" in operations:
        changed = [
            misspell(word, place[i], generator) if typo[i] < TYPO * strength else word
            for i, word in enumerate(changed)
        ]
    if "drop" in operations:
        kept = [word for i, word in enumerate(changed) if drop[i] >= DROP * strength]
        changed = kept or [changed[int(place[0] * len(changed))]]
    if "swap" in operations:
        changed = swap_neighbours(changed, swap, SWAP * strength)
    return text if changed == words else " ".join(changed)


def swap_neighbours(words: list[str], draws: list[float], probability: float) -> list[str]:
    """Swap words i and i + 1 where draw i is below `probability`; each moves once."""
    swapped, i = list(words), 0
    while i < len(swapped) - 1:
        if draws[i] < probability:
            swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
            i += 1
        i += 1
    return swapped


def misspell(word: str, place: float, generator: torch.Generator) -> str:
    """Delete, double or replace one letter, or exchange it with the next; `place` is in [0, 1).

    A replacing letter comes from the word itself, so it belongs to the script. A word of one letter
    stays as it is.
    """
    if len(word) < 2:
        return word
    at = int(place * len(word))
    kind, other = (int(x) for x in torch.randint(1 << 30, (2,), generator=generator))
    if kind % 4 == 0:
        return word[:at] + word[at + 1 :]
    if kind % 4 == 1:
        return word[:at] + word[at] + word[at:]
    if kind % 4 == 2:
        return word[:at] + word[other % len(word)] + word[at + 1 :]
    at = min(at, len(word) - 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
