"""A finished model on other data: metrics, and predictions as a table."""
