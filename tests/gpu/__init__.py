"""What only a CUDA device can show. ``make gpu-check``."""
