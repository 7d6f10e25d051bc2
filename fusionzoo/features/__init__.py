"""Features of frozen encoders: encode a data set once, and cache the result on disk."""
