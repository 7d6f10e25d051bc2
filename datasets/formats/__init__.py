"""Forms in which one's own data comes: a manifest or class folders."""

from . import folders, manifest

__all__ = ["folders", "manifest"]
