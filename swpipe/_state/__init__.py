"""State outside the context: found, saved, and restored bit for bit."""
