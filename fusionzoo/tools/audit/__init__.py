"""Look for faults in a data set, and show samples of it."""
