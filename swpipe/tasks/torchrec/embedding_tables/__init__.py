"""State of embedding tables besides parameters: prefetches, hidden rows, and memory of ids."""
