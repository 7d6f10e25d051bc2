"""Forms in which one's own data comes: a manifest, class folders, separate sources to join."""

from . import folders, join, manifest

__all__ = ["folders", "join", "manifest"]
