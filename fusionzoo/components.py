"""Register components of your own from Python: `register(MyFusion)` in a script or a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from .datasets import DATASETS
from .encoders import ENCODERS, Encoder
from .errors import FusionZooError, did_you_mean
from .fusion import FUSIONS, Fusion
from .registry import Registry
from .training.balance import BALANCE, Balance
from .training.tasks.base import OBJECTIVES, Task

C = TypeVar("C", bound=Callable[..., Any])

REGISTRIES: dict[str, Registry[Any, Any]] = {
    "fusion": FUSIONS,
    "encoder": ENCODERS,
    "dataset": DATASETS,
    "balance": BALANCE,
    "objective": OBJECTIVES,
}
BASES: dict[str, type] = {
    "fusion": Fusion,
    "encoder": Encoder,
    "balance": Balance,
    "objective": Task,
}
DEFAULT_FAMILIES = {"fusion": "early", "dataset": "built-in", "objective": "objective"}


def register(component: C, *, kind: str | None = None, name: str | None = None, **facts: Any) -> C:
    """Register a class, or the function that opens a data set, and return it.

    `kind` is fusion, encoder, dataset, balance or objective; default: by the base class, and a
    function opens a data set. `name` is by default that of the class, `MyFusion` as `my_fusion`.
    Facts such as `family` and `paper` are those of the decorators, `FUSIONS.register(...)`; the
    family is by default `early` of a fusion, its `kind` of an encoder, `built-in` of a data set.
    """
    kind = kind or _kind_of(component)
    if kind not in REGISTRIES:
        raise FusionZooError(
            f"kind={kind!r} is no kind of component.{did_you_mean(kind, REGISTRIES)} There are:"
            f" {', '.join(REGISTRIES)}."
        )
    if kind in BASES and not (isinstance(component, type) and issubclass(component, BASES[kind])):
        raise FusionZooError(
            f"{component.__name__} is no subclass of {BASES[kind].__name__}, as kind={kind!r} needs"
        )
    if "family" not in facts:
        family = getattr(component, "kind", None) if kind == "encoder" else None
        facts["family"] = family or DEFAULT_FAMILIES.get(kind, "")
    return REGISTRIES[kind].register(name or _snake_case(component.__name__), **facts)(component)


def _kind_of(component: Callable[..., Any]) -> str:
    if not isinstance(component, type):
        return "dataset"
    for kind, base in BASES.items():
        if issubclass(component, base):
            return kind
    raise FusionZooError(
        f"{component.__name__} is a subclass of none of"
        f" {', '.join(base.__name__ for base in BASES.values())}: say kind="
    )


def _snake_case(name: str) -> str:
    """Return a class's name as a file is named.

    >>> _snake_case("MyFusion"), _snake_case("GMU"), _snake_case("words")
    ('my_fusion', 'gmu', 'words')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
