"""Exchange of batch rows between ranks, so that all ranks have the same workload."""
