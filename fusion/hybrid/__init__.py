"""Hybrid fusions, one module each; importing this package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f".{_module.name}", __name__)
