"""A quality report of one or two files of embeddings."""
