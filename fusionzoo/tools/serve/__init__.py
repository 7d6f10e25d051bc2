"""Serve a model over HTTP: requests are limited, decoded apart, and answered in batches."""
