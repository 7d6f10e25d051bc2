"""Hybrid fusions, one module each; importing this package registers them all."""

from fusionzoo.ground.registry import import_siblings

import_siblings(__path__, __name__)
