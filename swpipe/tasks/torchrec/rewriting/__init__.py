"""What becomes of a model: how inputs are found, and the forwards of sharded modules."""
