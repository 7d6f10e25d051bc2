"""Shards: a data set as a few large files, which are read a block of samples at a time."""
