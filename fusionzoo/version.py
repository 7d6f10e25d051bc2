"""The version of this package; pyproject.toml and CITATION.cff follow it."""

__version__ = "0.1.0"
