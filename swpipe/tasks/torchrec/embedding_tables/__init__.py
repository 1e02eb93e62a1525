"""What tables keep beside parameters: prefetches, rows elsewhere, memory of ids."""
