"""The examples of docs/own_loop.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "own_loop.md").read_text()
SECTIONS = {  # heading -> the model that it saves
    "Plain PyTorch": "my_model",
    "accelerate": "my_accelerated_model",
    "Lightning": "my_lightning_model",
}
NEEDS = {
    name: pytest.mark.needs(name.lower(), extra="loops") for name in ("accelerate", "Lightning")
}


def block(text: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return code


def test_every_section_has_an_example() -> None:
    assert re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE) == [*SECTIONS]


@pytest.mark.slow  # a new process imports torch, and Lightning, and trains
@pytest.mark.parametrize("heading", [pytest.param(x, marks=NEEDS.get(x, ())) for x in SECTIONS])
def test_an_example_trains_a_model_that_loads(heading: str, tmp_path: Path) -> None:
    saved = SECTIONS[heading]
    opening, *rest = PAGE.split("\n## ")
    (section,) = [part for part in rest if part.startswith(f"{heading}\n")]
    answer = f"print(fz.load({saved!r}).predict([{{'text': 'two'}}]))"
    code = "\n".join([block(opening), block(section), answer])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Prediction(" in done.stdout
