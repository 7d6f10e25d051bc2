"""A name for every encoder, fusion and data set: one small class serves all three."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

from .errors import FusionZooError, did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[T]):
    """Facts about one registered class; the summary is its docstring's first line."""

    name: str
    cls: Callable[..., T]
    summary: str
    family: str
    paper: str | None = None
    reads: str = ""
    synergy: bool = True  # of a fusion: whether it can express an exclusive or of two modalities
    at_least: int = 1  # modalities a fusion needs

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword-only arguments of the constructor: what the command line may set."""
        given = inspect.signature(self.cls).parameters.values()
        return {p.name: p for p in given if p.kind is p.KEYWORD_ONLY}

    @property
    def open_ended(self) -> bool:
        """Whether the constructor passes further settings on, say to timm, which checks them."""
        given = inspect.signature(self.cls).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in given)


@cache
def _hints(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a constructor's arguments, where they can be looked up."""
    try:
        return get_type_hints(made.__init__ if isinstance(made, type) else made)  # type: ignore[misc]
    except NameError:
        return {}  # imported for the type checker alone


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def _problem(hint: Any, value: Any) -> str:
    """Say why `value` is not of the type `hint`; a list of JSON or YAML may stand for a tuple."""
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value, strict=not isinstance(value, list | dict))
    except ValidationError as error:
        reasons = dict.fromkeys(one["msg"][:1].lower() + one["msg"][1:] for one in error.errors())
        return ", or ".join(reasons)
    return ""


class Registry(Generic[T]):
    """A mapping of names to entries that never overwrites and that knows the nearest name.

    >>> SHAPES: Registry[object] = Registry("shape", "shapes")
    >>> @SHAPES.register("round", family="plane")
    ... class Round:
    ...     '''No corner at all.'''
    >>> SHAPES["round"].summary
    'No corner at all.'
    """

    def __init__(self, noun: str, listed_by: str) -> None:
        self.noun, self.listed_by = noun, listed_by
        self._entries: dict[str, Entry[T]] = {}

    def register(
        self,
        name: str | None = None,
        *,
        family: str,
        paper: str | None = None,
        reads: str = "",
        synergy: bool = True,
        at_least: int = 1,
    ) -> Callable[[C], C]:
        """Register the decorated class, by default under the name of the file it stands in."""

        def decorate(cls: C) -> C:
            key = name or cls.__module__.rpartition(".")[2]
            if key in self._entries:
                raise FusionZooError(f"{self.noun} {key!r} is registered twice")
            summary = (inspect.getdoc(cls) or "").partition("\n")[0]
            facts = (summary, family, paper, reads, synergy, at_least)
            self._entries[key] = Entry(key, cls, *facts)
            return cls

        return decorate

    def create(self, name: str, *args: Any, **settings: Any) -> T:
        """Build the entry `name`; a setting that its constructor does not have, or a number or word
        that is not of the annotated type, is an error."""
        entry = self[name]
        for key in settings if not entry.open_ended else ():
            if key not in entry.parameters:
                raise FusionZooError(
                    f"{self.noun} {name!r} has no setting {key!r}."
                    f"{did_you_mean(key, [*entry.parameters, 'name'])} It has: "
                    f"{', '.join(entry.parameters) or 'none'}."
                )
        hints = _hints(entry.cls)
        given = inspect.signature(entry.cls).bind_partial(*args, **settings).arguments
        for key, value in given.items():
            # What a command line or a file holds; objects of Python code are the constructor's.
            if key in hints and (
                value is None or isinstance(value, str | int | float | list | dict)
            ):
                problem = _problem(hints[key], value)
                if problem:
                    raise FusionZooError(f"{self.noun} {name!r}: {key}={value!r}: {problem}")
        return entry.cls(*args, **settings)

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries:
            raise FusionZooError(
                f"unknown {self.noun} {name!r}.{did_you_mean(name, self._entries)}"
                f" `{self.listed_by}` lists all {len(self._entries)}."
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
