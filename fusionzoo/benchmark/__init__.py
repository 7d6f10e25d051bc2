"""Compare fusions: frozen features, cells, protocol, report. The script is benchmark.py."""
