"""Ready-made task sets for real workloads."""
