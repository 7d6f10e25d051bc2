"""Sources of one's own data: a table (manifest), class folders, public layouts."""

from fusionzoo.registry import import_siblings

import_siblings(__path__, __name__)
