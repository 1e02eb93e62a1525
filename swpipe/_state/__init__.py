"""State outside the context: found, saved, and put back bit for bit."""
