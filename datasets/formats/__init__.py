"""Forms in which one's own data comes: a manifest, class folders, separate sources to join."""

from fusionzoo.registry import import_siblings

import_siblings(__path__, __name__)
