"""The hostile files of perf/hostile.py, and a process of its own that opens each."""
