"""Embeddings: computed in parts of consecutive rows, stored in one file, read again."""
