"""Pages: the head and look that all have in common, and how they show samples."""
