"""The contracts of components, as checks that anyone can run on a component of their own.

In a test of yours; a class stands at the top of its module, or is named as on a command line:

    from fusionzoo.testing import check_fusion
    from my_package.fusions import MyFusion

    def test_my_fusion_keeps_the_contract() -> None:
        check_fusion(MyFusion, heads=4)  # settings of its constructor

Or one case of pytest for each check, of which some are expected to fail, for a reason:

    @parametrize_with_checks(MyFusion, expected_failed_checks={"it_compiles_whole": "a loop"})
    def test_contract(check): check()

On the command line: `fusionzoo zoo check my.py:MyFusion --set heads=4`. A check builds the
component, tries inputs that commonly break one, and raises `AssertionError` with the smallest input
that fails; `check_fusion` and its like run all of a kind, and name those that failed. A name that
is unknown and a file that is missing are a `FusionZooError`. Only `parametrize_with_checks` needs
pytest, and torch is imported when it is called or the first component is checked. `runner` names
the suite of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

Target = str | Callable[..., Any]  # a name, `module:Class`, `file.py:Class`, or the class itself


def check_fusion(target: Target, /, **settings: Any) -> None:
    """Hold a fusion to the contract: missing content changes nothing, it learns, it compiles.

    Takes some seconds; every check is a `Tried:` line of `fusionzoo.testing.fusions`.
    """
    _check(target, "fusion", settings)


def check_encoder(target: Target, /, **settings: Any) -> None:
    """Hold an encoder to the contract: a row's features depend on that row alone, it rebuilds.

    `timm/resnet18` is a name, too; `pretrained=False` spares the download.
    """
    _check(target, "encoder", settings)


def check_dataset(target: Target, /, **settings: Any) -> None:
    """Hold a data set to the contract: ids, splits, targets, decoded alike in every process.

    `target` is a function that returns a `PairedDataset`, or names one.
    """
    _check(target, "data", settings)


def check_strategy(target: Target, /, **settings: Any) -> None:
    """Hold a training strategy to the contract: off is off, and two processes learn what one does.

    Its settings must be values of JSON, which a second process reads.
    """
    _check(target, "balance", settings)


def check_objective(target: Target, /, **settings: Any) -> None:
    """Hold an objective to the contract: a finite loss for each row, a prior, metrics."""
    _check(target, "objective", settings)


def parametrize_with_checks(
    *targets: Target,
    kind: str = "fusion",
    settings: Mapping[str, Any] | None = None,
    checks: Sequence[str] | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Decorate a test that calls its argument `check`: pytest runs one case for each check.

    Settings:
        kind: fusion, encoder, data, balance or objective
        settings: of the constructor
        checks: the names of those to run; default: all of the kind
        expected_failed_checks: name of a check -> why it fails; one that passes is a failure
    """
    import pytest

    from .runner import cases

    chosen = cases(targets, kind, settings or {}, checks, expected_failed_checks or {})
    return pytest.mark.parametrize("check", chosen)


def _check(target: Target, kind: str, settings: dict[str, Any]) -> None:
    from .runner import require

    require(target, kind, settings)
