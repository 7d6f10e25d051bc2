"""Data sets that need no files of one's own, one file each."""
