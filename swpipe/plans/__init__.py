"""Ready-made plans: how to overlap, for tasks that come in a familiar shape."""

from swpipe.plans.bounds import Bounds, lower_bounds
from swpipe.plans.limits import Limits
from swpipe.plans.prefetch import prefetch_plan
from swpipe.plans.simulate import Simulation, simulate

__all__ = ["Bounds", "Limits", "Simulation", "lower_bounds", "prefetch_plan", "simulate"]
