"""Rows of batches that ranks exchange, so that each has as much work."""
