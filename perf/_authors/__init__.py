"""The fusions that perf/authors.py compares, and how."""
