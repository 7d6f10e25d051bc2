"""Find encoders, fusion, datasets and the scripts in a checkout without symbolic links.

Git for Windows and some zip tools write text files in place of links, and an sdist has none. Then
`fusionzoo/__init__.py` imports this module. Only the names below are found at the repository's
root: with the root on `__path__`, `tests` and `fusionzoo` would be modules of it as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    **{f"fusionzoo.{name}": f"{name}/__init__.py" for name in ("encoders", "fusion", "datasets")},
    **{f"fusionzoo.scripts.{name}": f"{name}.py" for name in ("train", "embed", "benchmark")},
}


class Finder:
    """Map a module's name to its file at the root."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the module's spec, or None for a name that is not ours."""
        return spec_from_file_location(name, ROOT / FILES[name]) if name in FILES else None


if (ROOT / "pyproject.toml").is_file():
    sys.meta_path.insert(0, Finder)  # before the search in folders, which would find text files
