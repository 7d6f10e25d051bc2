"""The late fusions: one file each, found by name."""

from fusionzoo.registry import import_siblings

import_siblings(__path__, __name__)
