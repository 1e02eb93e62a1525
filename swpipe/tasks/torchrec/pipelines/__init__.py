"""Pipelines with ``progress``: TorchRec's under their names, staged ones, and any plan."""
