"""Tensors in nested containers."""
