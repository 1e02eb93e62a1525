"""Ready-made plans: how to overlap, for tasks that come in a familiar shape."""

from swpipe.plans.prefetch import prefetch_plan

__all__ = ["prefetch_plan"]
