"""Extraction of embeddings: parts of consecutive rows, computed in any order, then one file."""
