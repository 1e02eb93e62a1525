"""Polars, with one thread.

By default Polars and torch each use as many threads as there are cores, and would compete for them.
One thread each is enough, since the plan runs them at the same time. The variable must be set
before Polars is first imported; a value set by the user is kept.
"""

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import polars as pl

__all__ = ["pl"]
