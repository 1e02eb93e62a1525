"""State outside the context: searched for, saved, and restored bit for bit."""
