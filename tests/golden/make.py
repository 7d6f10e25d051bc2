"""Write the golden numbers of fusions: `python tests/golden/make.py gmu`, or all of them without a
name.

Weights and inputs are filled with a sine, so the numbers depend on no random generator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from fusionzoo.fusion import create_fusion, list_fusions
from fusionzoo.structures import Features

FOLDER = Path(__file__).parent / "fusion"
DIMS = {"image": 5, "text": 7, "audio": 3}


def wave(*shape: int, phase: float) -> torch.Tensor:
    """Return a sine over a tensor's elements."""
    size = int(torch.tensor(shape).prod())
    return (torch.arange(size, dtype=torch.float64) * 0.7 + phase).sin().reshape(shape)


def numbers(name: str) -> dict[str, object]:
    """Return parameter count and a summary of the logits of one fusion."""
    fusion = create_fusion(name, DIMS, 8, 4).double().eval()
    with torch.no_grad():
        for count, parameter in enumerate(fusion.parameters()):
            parameter.copy_(0.5 * wave(*parameter.shape, phase=count))
    given = {}
    for column, (modality, width) in enumerate(DIMS.items()):
        mask = torch.ones(4, 3 + column, dtype=torch.bool)
        mask[column + 1] = False  # sample 0 has everything, each other sample lacks one modality
        tokens = wave(4, 3 + column, width, phase=column)
        given[modality] = Features(tokens, mask, tokens.mean(1))
    logits = fusion(given).logits.detach()
    return {
        "parameters": sum(p.numel() for p in fusion.parameters()),
        "mean": logits.mean().item(),
        "std": logits.std().item(),
        "values": logits.flatten()[::3].tolist(),
    }


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or list_fusions():
        (FOLDER / f"{name}.json").write_text(json.dumps(numbers(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
