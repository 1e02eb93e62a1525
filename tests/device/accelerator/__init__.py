"""Tests that need an accelerator: the test backend, or CUDA."""
