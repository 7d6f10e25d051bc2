"""Formats for your own data: a table (manifest) or class folders."""

from fusionzoo.registry import import_siblings

import_siblings(__path__, __name__)
