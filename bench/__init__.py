"""Benchmarks: swpipe's own costs, as ratios measured in one run. ``python -m bench``."""
