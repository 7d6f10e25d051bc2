"""Mutated and hand-made hostile files, and a process of its own that opens each."""
