"""Formats for your own data: a table (manifest) or class folders."""

from . import folders, manifest

__all__ = ["folders", "manifest"]
