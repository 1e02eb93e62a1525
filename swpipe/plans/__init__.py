"""Ready-made plans for common kinds of training loops; each system's are in a module of its own."""

from swpipe.plans.prefetch import prefetch_plan

__all__ = ["prefetch_plan"]
