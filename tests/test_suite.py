"""What holds for the tests themselves: stored numbers allow for rounding, no process is left."""

from __future__ import annotations

import ast
import subprocess
import time
from pathlib import Path

import pytest

from helpers.leftovers import ended_with

TESTS = Path(__file__).parent
LEAST = 1e-5  # what single precision needs, and another CPU's order of summation
# Calls that compare, with the name of their absolute tolerance; without it, it is less.
TOLERANCES = {
    **{"approx": "abs", "assert_close": "atol", "assert_allclose": "atol", "allclose": "atol"},
    **{"isclose": "atol", "equal": "", "array_equal": "", "assert_array_equal": ""},
}


def is_measured(node: ast.AST) -> bool:
    """Tell whether a literal looks like a result: a fraction of four significant digits or more."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, float):
        return False
    if node.value.is_integer():  # a year, a count
        return False
    return len(f"{node.value:.12e}".split("e")[0].replace(".", "").strip("-0")) >= 4


def constants(tree: ast.AST) -> dict[str, float]:
    """Return the module's constants that are one number."""
    return {
        node.targets[0].id: float(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
    }


def too_exact(tree: ast.Module) -> list[int]:
    """Return the lines that hold a stored number to less than `LEAST`.

    Stored are literals that look measured and, in functions that use a module constant with
    "golden" in its value, whatever is compared.
    """
    numbers = constants(tree)
    golden = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "golden" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    lines = []
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                keyword = TOLERANCES.get(ast.unparse(node.func).rpartition(".")[2])
                if keyword is None or not (names & golden or any(map(is_measured, ast.walk(node)))):
                    continue
                text = next((ast.unparse(k.value) for k in node.keywords if k.arg == keyword), "0")
                if numbers.get(text, _number(text)) < LEAST:
                    lines.append(node.lineno)
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                lines += [node.lineno for x in (node.left, *node.comparators) if is_measured(x)]
    return lines


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # computed from what is compared
        return LEAST


def test_no_test_presumes_the_last_bits_of_another_machine() -> None:
    lines = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for line in too_exact(ast.parse(path.read_text()))
    ]
    assert lines == [], f"state a tolerance of at least {LEAST}"


@pytest.mark.parametrize(
    ("line", "is_too_exact"),
    [
        ("assert x == 0.5613", True),
        ("assert x == 0.25", False),  # a count's share, or a setting
        ("assert x == pytest.approx(0.5613)", True),
        ("assert x == pytest.approx([0.5613, 1], abs=1e-6)", True),
        ("assert x == pytest.approx(0.5613, abs=1e-4)", False),
        ("torch.testing.assert_close(x, torch.tensor([0.5613]), rtol=0, atol=NEAR)", True),
        ("torch.testing.assert_close(x, torch.tensor([0.5613]), rtol=0, atol=5e-5)", False),
        ("assert_close(x, torch.tensor(json.loads(RECORDED.read_text())))", True),
        ("assert torch.equal(x, torch.tensor(json.loads(RECORDED.read_text())))", True),
        ("assert_close(x, json.loads(RECORDED.read_text()), atol=1e-4 * x.max())", False),
        ("assert torch.equal(first, second)", False),
    ],
)
def test_numbers_that_are_held_too_exactly_are_found(line: str, is_too_exact: bool) -> None:
    module = f'NEAR = 1e-6\nRECORDED = HERE / "golden" / "x.json"\ndef test_x():\n    {line}\n'
    assert bool(too_exact(ast.parse(module))) == is_too_exact


def runs(process: Path) -> bool:
    """Tell whether a process, by its folder in /proc, has not ended."""
    try:
        return (process / "stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_process_ends_with_its_test_however_it_was_started() -> None:
    with ended_with("a test"):
        done = subprocess.run(
            ["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"],  # its parent is gone at once
            capture_output=True,
            text=True,
            check=True,
        )
        process = Path("/proc") / done.stdout.strip()
        assert runs(process)
    deadline = time.monotonic() + 60
    while runs(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(process)
