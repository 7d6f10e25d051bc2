"""Folders that outlive a run: where downloads, features and facts are kept."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import FusionZooError


def cache_root() -> Path:
    """Return where they are kept: $FUSIONZOO_CACHE, else ~/.cache/fusionzoo."""
    return Path(os.environ.get("FUSIONZOO_CACHE", "~/.cache/fusionzoo")).expanduser()


def make_cache_folder(folder: Path) -> Path:
    """Create a folder below the cache, or say which setting names another place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def cannot_write(folder: Path, error: OSError) -> FusionZooError:
    """Say why the cache cannot be written: a full disk is another matter than a permission."""
    reason = (error.strerror or str(error)).lower()
    return FusionZooError(
        f"cannot write to the cache {folder}: {reason}; the environment variable FUSIONZOO_CACHE"
        " names a folder where there is room and permission"
    )


def whole_lines(path: Path) -> list[str]:
    """Return the whole lines of a file; a kill may have cut the last one."""
    text = path.read_text() if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
