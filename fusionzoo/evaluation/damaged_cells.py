"""Corruptions of a table's cells, in five severities; see `robustness`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusionzoo.cells import Cell, is_number

Cells = Mapping[str, Cell]


def inexact_numbers(cells: Cells, severity: int, draw: np.random.Generator) -> dict[str, Cell]:
    """Scale each number by a log-normal factor, of 10 to 150 %; text stays."""
    level = (0.1, 0.25, 0.5, 1.0, 1.5)[severity - 1]
    factors = np.exp(level * draw.standard_normal(len(cells)))
    return {
        name: float(cell) * float(factor) if cell is not None and is_number(cell) else cell
        for (name, cell), factor in zip(cells.items(), factors, strict=True)
    }


def empty_cells(cells: Cells, severity: int, draw: np.random.Generator) -> dict[str, Cell]:
    """Empty 10 to 90 % of the cells, but never the last one."""
    filled = [name for name, cell in cells.items() if cell is not None]
    draws = draw.random(len(filled))
    lost = draws < (0.1, 0.3, 0.5, 0.7, 0.9)[severity - 1]
    if lost.all():
        lost[draws.argmax()] = False
    emptied = {name for name, is_lost in zip(filled, lost, strict=True) if is_lost}
    return {name: None if name in emptied else cell for name, cell in cells.items()}
