"""The table of a data set: its columns, paths, splits, labels and where it came from."""
