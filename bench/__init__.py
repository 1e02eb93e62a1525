"""Benchmarks that measure swpipe's costs as ratios within one run: ``python -m bench``."""
