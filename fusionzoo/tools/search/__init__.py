"""Search files of embeddings by text, image, audio, id or vector."""
