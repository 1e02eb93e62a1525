"""These tests need an accelerator: the test backend, or CUDA."""
