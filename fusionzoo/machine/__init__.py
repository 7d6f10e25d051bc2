"""Processes and their groups, CPUs, GPUs, memory and graphs."""
