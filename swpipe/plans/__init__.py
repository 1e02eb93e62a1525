"""Ready-made plans for common kinds of training loops."""

from swpipe.plans.prefetch import prefetch_plan

__all__ = ["prefetch_plan"]
