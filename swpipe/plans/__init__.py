"""Ready-made plans for common training loops, with one module or package per kind of loop."""

from swpipe.plans.prefetch import prefetch_plan

__all__ = ["prefetch_plan"]
