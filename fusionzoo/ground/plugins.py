"""Components from outside of fusionzoo: import what registers them; where a class is defined."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module, invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

PLUGINS = __name__  # the package of the modules of plugin files
GROUP = "fusionzoo.plugins"  # of entry points: what installed packages name
REFERENCE = re.compile(r"(?:[\w.]+|.*\.py):[A-Za-z_]\w*")
__path__: list[str] = []  # modules may lie below this one: `_PluginFinder` finds them
_log = logging.getLogger("fusionzoo")
_loaded_groups: set[str] = set()  # of entry points
_files: dict[str, ModuleType] = {}  # the module of each file that was a plugin, by the file's name
_imports_allowed = ContextVar("imports_allowed", default=True)


def source_of(cls: type) -> str | None:
    """Return what to import for a class, `my_file.py` or `my_package.my_module`; None: fusionzoo.

    Of a file the name alone, for a path says nothing on another machine.
    """
    package, _, name = cls.__module__.rpartition(".")
    if package.startswith(f"{PLUGINS}."):
        return f"{name}.py"
    return None if cls.__module__.partition(".")[0] == "fusionzoo" else cls.__module__


def definition_of(cls: Any) -> str:
    """Return where a class or function is defined: `fusionzoo.fusion.early.gmu:GMU`, or a file."""
    file = "" if source_of(cls) is None else file_of(sys.modules.get(cls.__module__))
    return f"{file or cls.__module__}:{cls.__qualname__}"


def file_of(module: ModuleType | None) -> str:
    """Return the path of a module's file; empty: it has none."""
    return getattr(module, "__dict__", {}).get("__file__") or ""


def code_digest(cls: Any) -> str | None:
    """Return a digest of the file that defines a plugin's class; None: the class is fusionzoo's.

    Results that are kept on disk depend on it, as they depend on fusionzoo's version.
    """
    return None if source_of(cls) is None else file_digest(cls)


def file_digest(defined: Any) -> str:
    """Hash the file of a class or module; empty: it has none, as in a notebook."""
    try:
        return hashlib.sha256(Path(inspect.getfile(defined)).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


class _PluginFinder(MetaPathFinder):
    """Find the package `fusionzoo.ground.plugins.x<path in hex>`: the files of one folder.

    The module of a plugin file says where the file is, so any process can import it by its name: a
    data loader's worker does when it unpickles an object of a plugin's class.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, code = fullname.rpartition(".")
        if parent != __name__ or not code.startswith("x"):
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [bytes.fromhex(code[1:]).decode()]
        return spec


if not any(type(finder).__name__ == "_PluginFinder" for finder in sys.meta_path):
    sys.meta_path.append(_PluginFinder())


def load_plugins(plugins: str | Sequence[str]) -> list[ModuleType]:
    """Import plugins, `"my_file.py, my_package.my_module"` or a list; a second time does nothing.

    A file beside the plugin is imported relatively: `from .helpers import normalise`.
    """
    return [_import(plugin) for plugin in plugin_list(plugins)]


def plugin_list(plugins: str | Sequence[str]) -> list[str]:
    """Return the plugins one by one.

    >>> plugin_list("a.py, b.c")
    ['a.py', 'b.c']
    """
    words = plugins.split(",") if isinstance(plugins, str) else plugins
    return [word.strip() for word in words if word.strip()]


def absolute(plugins: str | Sequence[str]) -> list[str]:
    """Return the plugins as another process finds them, whatever its working folder."""
    return [
        str(Path(plugin).expanduser().resolve()) if plugin.endswith(".py") else plugin
        for plugin in plugin_list(plugins)
    ]


def load_installed() -> None:
    """Import the plugins of installed packages, once; one that fails is a warning."""
    if GROUP in _loaded_groups:
        return
    _loaded_groups.add(GROUP)  # first: a plugin may itself ask a registry
    for point in installed_plugins():
        try:
            point.load()
        except Exception as error:
            _log.warning(
                "the plugin %s = %s of an installed package cannot be imported: %s: %s",
                *(point.name, point.value, type(error).__name__, one_line(error)),
            )


def installed_plugins() -> Sequence[Any]:
    """Return the entry points of installed packages; nothing of them is imported."""
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


def is_reference(name: str) -> bool:
    """Whether a name is of the form `my_module:MyClass` or `my_file.py:MyClass`.

    >>> is_reference("my_package.fusions:Mine"), is_reference("hf/pkg:a-model/folder")
    (True, False)
    """
    return REFERENCE.fullmatch(name) is not None


def import_class(reference: str) -> Any:
    """Return what `my_module:MyClass` refers to."""
    plugin, _, name = reference.rpartition(":")
    module = _import(plugin) if _imports_allowed.get() else _imported(plugin)
    if module is None:
        raise FusionZooError(
            f"{reference} is not imported, and no model folder may import it: pass"
            f" plugins=[{plugin!r}]"
        )
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise FusionZooError(f"{plugin} has no {name!r}.{did_you_mean(name, classes)}")
    return getattr(module, name)


@contextmanager
def imports_forbidden() -> Iterator[None]:
    """In the block, let `module:Class` name what is imported already, and import nothing else."""
    token = _imports_allowed.set(False)
    try:
        yield
    finally:
        _imports_allowed.reset(token)


def missing_plugins(recorded: Sequence[str]) -> list[str]:
    """Return which of the plugins that `source_of` named this process has not imported.

    `__main__`, a notebook or a script, may be another one than it was: it always counts.
    """
    return [name for name in recorded if name == "__main__" or _imported(name) is None]


def _import(plugin: str) -> ModuleType:
    try:
        if plugin.endswith(".py"):
            return _import_file(Path(plugin))
        return _import_module(plugin)
    except (Exception, SystemExit) as error:
        if isinstance(error, FusionZooError) and str(error).startswith("plugin "):
            raise  # a plugin that loads another one
        line = _line_in(plugin, error)
        kind = "" if isinstance(error, FusionZooError) else f"{type(error).__name__}: "
        raise FusionZooError(f"plugin {plugin}{line}: {kind}{one_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FusionZooError(f"there is no file {path}")
    if not path.stem.isidentifier():
        raise FusionZooError(f"{path.stem!r} is no name for a module: use letters, digits and _")
    invalidate_caches()  # the file may be newer than the folder's listing
    module = _imported_from(path) or import_module(_module_name(path))
    _files[path.name] = module
    return module


def _import_module(name: str) -> ModuleType:
    package, here = name.partition(".")[0], Path.cwd()
    in_folder = (here / package).is_dir() or (here / f"{package}.py").is_file()
    if in_folder and str(here) not in sys.path and find_spec(package) is None:
        # Last, where it hides no package; for good, so that child processes find it too.
        sys.path.append(str(here))
        invalidate_caches()
    spec = None if name in sys.modules else find_spec(name)
    known = _imported_from(Path(spec.origin)) if spec and spec.origin else None
    return known or import_module(name)


def _imported_from(path: Path) -> ModuleType | None:
    """Return the module of a file that was imported before, perhaps under another name."""
    for module in list(sys.modules.values()):
        if file_of(module).endswith(path.name) and Path(file_of(module)).resolve() == path:
            return module
    return None


def _imported(plugin: str) -> ModuleType | None:
    """Return the module of a plugin if it is imported; of a file the name may be enough."""
    if not plugin.endswith(".py"):
        return sys.modules.get(plugin)
    exact = sys.modules.get(_module_name(Path(plugin).expanduser().resolve()))
    if exact is not None:
        return exact
    module = _files.get(Path(plugin).name)
    return None if module is None else sys.modules.get(module.__name__)


def _module_name(path: Path) -> str:
    """Return the name of a plugin file's module, which follows from its path.

    >>> _module_name(Path("/a/mine.py"))
    'fusionzoo.ground.plugins.x2f61.mine'
    """
    return f"{__name__}.x{str(path.parent).encode().hex()}.{path.stem}"


def _line_in(plugin: str, error: BaseException) -> str:
    """Return `, line 3` for the last line of a plugin's file that led to an error."""
    lines, trace = [], error.__traceback__
    file = Path(plugin).name if plugin.endswith(".py") else f"{plugin.rpartition('.')[2]}.py"
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {lines[-1]}" if lines else ""
