"""Templates of pages: self-contained files, escaped by Jinja."""

from __future__ import annotations

from typing import Any

from fusionzoo.errors import FusionZooError


def template(name: str, package: str = "fusionzoo.vectors") -> Any:
    """Return a template of a package, which may extend the audit's base.html."""
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader
    except ImportError:
        raise FusionZooError("HTML pages need Jinja: pip install 'fusionzoo[benchmark]'") from None
    loaders = [PackageLoader(package, "."), PackageLoader("fusionzoo.audit", ".")]
    return Environment(
        loader=ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template(name)
