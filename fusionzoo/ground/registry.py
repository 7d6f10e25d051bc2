"""Names for components: one small class serves fusions, encoders, data sets, strategies, ..."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_type_hints

from fusionzoo.errors import FusionZooError, check_known, did_you_mean

from .plugins import definition_of, import_class, is_reference, load_installed

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
E = TypeVar("E", bound="Entry[Any]")
SECTIONS = ("Missing", "Pitfall", "Use when", "Settings", "Shapes")


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """Facts about one registered class; the summary is its docstring's first line.

    A kind of component with further facts has a subclass of its own, such as `FusionEntry`.
    """

    name: str
    cls: Callable[..., T]
    summary: str
    family: str = ""
    paper: str | None = None
    hidden: bool = False  # made by training: built by name, but in no list

    @property
    def pattern(self) -> str:
        """How a list shows it."""
        return self.name

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword-only arguments of the constructor: what the command line may set.

        Those of a dataclass that it takes whole, as `settings`, come first.
        """
        whole = settings_class(self.cls)
        return {**(keyword_only(whole) if whole else {}), **keyword_only(self.cls)}

    @property
    def open_ended(self) -> bool:
        """Whether the constructor passes further settings on, say to timm, which checks them."""
        arguments = inspect.signature(self.cls).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in arguments)

    @property
    def hints(self) -> dict[str, Any]:
        """The types of the arguments, where they can be looked up."""
        whole = settings_class(self.cls)
        return {**(type_hints(whole) if whole else {}), **type_hints(self.cls)}

    def build(self, *args: Any, **settings: Any) -> T:
        """Call the constructor."""
        return self.cls(*args, **settings)


class NewName(NamedTuple):
    """What an entry is called now, and the version from which its old name is unknown."""

    name: str
    removed_in: str


class Registry(Generic[T, E]):
    """A mapping of names to entries that never overwrites and that suggests the nearest name.

    Plugins of installed packages are imported when a name is unknown, or when all are listed. With
    a `base` class, names such as `my_module:MyClass` are imported, and must be subclasses of it.
    `packages` have the modules that register entries; they are imported when the first is asked
    for.

    >>> SHAPES: Registry[object, Entry[object]] = Registry("shape", "shapes", Entry, ("2d", "3d"))
    >>> @SHAPES.register("round", family="2d")
    ... class Round:
    ...     '''No corner at all.'''
    >>> SHAPES["round"].summary
    'No corner at all.'
    """

    def __init__(
        self,
        noun: str,
        listed_by: str,
        entry: type[E],
        families: Sequence[str],
        *,
        base: type | None = None,
        default_family: str = "",
        packages: Sequence[str] = (),
    ) -> None:
        self._packages = (*packages,)
        self.noun, self.listed_by, self.entry = noun, listed_by, entry
        self.families, self.default_family = tuple(families), default_family
        self.base = base
        self._entries: dict[str, E] = {}
        self._renamed: dict[str, NewName] = {}
        self._warned: set[str] = set()  # old names

    def register(self, name: str | None = None, **facts: Any) -> Callable[[C], C]:
        """Register the decorated class, by default under the name of the file that defines it.

        `facts` are the other fields of an entry: `family` and, where known, `paper` and so on.
        """

        def decorate(cls: C) -> C:
            self._fill()
            key = name or cls.__module__.rpartition(".")[2]
            if key in self._renamed:
                raise FusionZooError(
                    f"{self.noun} {key!r} is the old name of {self._renamed[key].name!r}"
                )
            known = self._entries.get(key)
            # A notebook cell that runs again, or a module that is reloaded, defines one class anew.
            if known is not None and definition_of(known.cls) != definition_of(cls):
                raise FusionZooError(
                    f"{self.noun} {key!r} is registered twice: by {definition_of(known.cls)} and"
                    f" by {definition_of(cls)}"
                )
            self._entries[key] = self._make_entry(key, cls, facts)
            return cls

        return decorate

    def rename(self, old: str, new: str, *, removed_in: str) -> None:
        """Let an old name, which no list shows, stand for a registered entry, with one warning.

        Called below the entry, by whoever gave it another name:
        `FUSIONS.rename("gated_unit", "gmu", removed_in="0.4")`.
        """
        if new not in self._entries or old in self._entries:
            wrong = f"there is no {new!r}" if new not in self._entries else f"{old!r} is in use"
            raise FusionZooError(f"{self.noun} {old!r} cannot be renamed {new!r}: {wrong}")
        self._renamed[old] = NewName(new, removed_in)

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
        hints = entry.hints
        positional = inspect.signature(entry.cls).bind_partial(*args).arguments
        for key, value in {**positional, **settings}.items():
            # What a command line or a file holds; objects of Python code are the constructor's.
            if key in hints and (
                value is None or isinstance(value, str | int | float | list | dict)
            ):
                problem = _problem(hints[key], value)
                if problem:
                    raise FusionZooError(f"{self.noun} {name!r}: {key}={value!r}: {problem}")
        return entry.build(*args, **settings)

    def names(self, pattern: str | None = None, family: str | None = None) -> list[str]:
        """Return the names, as a list shows them, that match a pattern and are of a family."""
        entries = [self._entries[name] for name in self]
        return sorted(
            {
                entry.pattern
                for entry in entries
                if family in (None, entry.family)
                and (
                    pattern is None or matches(pattern, entry.pattern, entry.family, self.families)
                )
            }
        )

    def registered(self, name: str) -> bool:
        """Whether a name is registered so far; unlike `in`, this imports no plugin."""
        self._fill()
        return name in self._entries or name in self._renamed

    def __getitem__(self, name: str) -> E:
        entry = self._find(name)
        if entry is None:
            raise FusionZooError(
                f"unknown {self.noun} {name!r}.{did_you_mean(name, self)}"
                f" `{self.listed_by}` lists all {len(self)}."
            )
        return entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        self._fill()
        load_installed()
        return (name for name, entry in self._entries.items() if not entry.hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _fill(self) -> None:
        """Import the packages that register entries, once."""
        packages, self._packages = self._packages, ()
        for package in packages:
            import_siblings(import_module(package).__path__, package)

    def _find(self, name: str) -> E | None:
        self._fill()
        if self.base is not None and name not in self._entries and is_reference(name):
            return self._from_reference(name, self.base)
        if not (name in self._entries or name in self._renamed):
            load_installed()
        return self._entries.get(self._current(name))

    def _current(self, name: str) -> str:
        """Return the name that an entry has now, and warn once of an old one."""
        if name not in self._renamed:
            return name
        renamed = self._renamed[name]
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{self.noun} {name!r} is now called {renamed.name!r}; fusionzoo"
                f" {renamed.removed_in} will not know the old name",
                FutureWarning,
                stacklevel=2,
            )
        return renamed.name

    def _from_reference(self, reference: str, base: type) -> E:
        """Import `my_module:MyClass`; facts are those of its registration, else of the class."""
        cls = import_class(reference)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise FusionZooError(
                f"{reference} is no {self.noun}: it must be a subclass of"
                f" {base.__module__.removesuffix('.base')}.{base.__name__}"
            )
        for entry in self._entries.values():
            if entry.cls is cls:
                return replace(entry, name=reference)
        family = getattr(cls, "family", getattr(cls, "kind", self.default_family))
        names = [fact for fact in self._fact_names() if fact != "family" and hasattr(cls, fact)]
        facts = {fact: getattr(cls, fact) for fact in names}
        return self._make_entry(reference, cls, {**facts, "family": family})

    def _make_entry(self, name: str, cls: Callable[..., Any], facts: Mapping[str, Any]) -> E:
        for fact in facts:
            problem = f"{self.noun} {name!r} is registered with an unknown fact {fact}="
            check_known(fact, self._fact_names(), problem, "Known")
        family = facts.get("family", "")
        if not facts.get("hidden"):
            problem = f"unknown family {family!r}" if family else "family= is missing"
            check_known(family, self.families, f"{self.noun} {name!r}: {problem}", "There are")
        summary = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        return self.entry(name=name, cls=cls, summary=summary, **facts)

    def _fact_names(self) -> list[str]:
        return [x.name for x in fields(self.entry) if x.name not in ("name", "cls", "summary")]


def matches(pattern: str, name: str, family: str, families: Iterable[str]) -> bool:
    """Whether a shell pattern such as `m*` matches a name; a family's name stands for the family.

    >>> matches("m*", "mbt", "attention", FAMILIES := ("early", "attention"))
    True
    >>> matches("early", "early", "attention", FAMILIES)
    False
    """
    return family == pattern if pattern in families else fnmatchcase(name, pattern)


def import_siblings(path: Iterable[str], package: str) -> None:
    """Import every module and folder of a package, but for those whose names start with `_`."""
    for module in iter_modules(path):
        if not module.name.startswith("_"):
            import_module(f"{package}.{module.name}")


@cache
def type_hints(cls: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a constructor's arguments, where they can be looked up."""
    try:
        return get_type_hints(cls.__init__ if isinstance(cls, type) else cls)  # type: ignore[misc]
    except NameError:
        return {}  # imported for the type checker alone


@cache
def keyword_only(component: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the keyword-only arguments of a class or function."""
    arguments = inspect.signature(component).parameters.values()
    return {p.name: p for p in arguments if p.kind is p.KEYWORD_ONLY}


def settings_class(component: Callable[..., Any]) -> type | None:
    """Return the dataclass that a function takes as `settings`, with all that users may set."""
    hint = type_hints(component).get("settings")
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


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
        reasons = dict.fromkeys(x["msg"][:1].lower() + x["msg"][1:] for x in error.errors())
        return ", or ".join(reasons)
    return ""


def sections(text: str) -> dict[str, str]:
    """Split a docstring; the text between the first line and the first section has the key "".

    >>> sections("Do it.\\n\\ny = x\\n\\nMissing: 0.\\nPitfall: none\\nknown.")["Pitfall"]
    'none known.'
    """
    titles = "|".join(SECTIONS)
    body = text.partition("\n")[2].strip()
    equation, *rest = re.split(rf"^({titles}):\s*", body, flags=re.MULTILINE)
    by_title = dict.fromkeys(("", *SECTIONS), "") | {"": " ".join(equation.split())}
    for title, words in zip(rest[::2], rest[1::2], strict=True):
        by_title[title] = " ".join(words.split())
    return by_title
