"""Audit of a data set: faults of its samples, leaks between splits, balance (`data check`)."""
