"""Pipelines with ``progress``: TorchRec's by name, in stages, and under any plan."""
