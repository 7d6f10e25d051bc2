"""Data sets that need no files of one's own, one file each."""

from fusionzoo.registry import import_siblings

import_siblings(__path__, __name__)
