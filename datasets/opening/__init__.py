"""Open one's own data: from a name, a path or settings to a `PairedDataset`."""
