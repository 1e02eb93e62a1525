"""Replacement of a model's sharded modules: how inputs are found, and the new forwards."""
