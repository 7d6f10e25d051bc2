"""Features of frozen encoders: computed once per data set, kept in a memory-mapped cache."""
