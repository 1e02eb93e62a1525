"""Ready-made plans: how to overlap, for tasks that come in a familiar shape."""

from swpipe.plans.limits import Limits
from swpipe.plans.modulo.auto import Choice, auto_plan
from swpipe.plans.modulo.optimum import Proof, prove
from swpipe.plans.prefetch import prefetch_plan
from swpipe.plans.published.joint import JointSearch, joint_search
from swpipe.plans.published.list_schedule import ListSchedule, list_schedule
from swpipe.plans.published.lookahead import Lookaheads, assign_lookaheads
from swpipe.plans.simulation.bounds import Bounds, lower_bounds
from swpipe.plans.simulation.simulate import Simulation, simulate
from swpipe.plans.verify import Verified, verify

__all__ = [
    "Bounds",
    "Choice",
    "JointSearch",
    "Limits",
    "ListSchedule",
    "Lookaheads",
    "Proof",
    "Simulation",
    "Verified",
    "assign_lookaheads",
    "auto_plan",
    "joint_search",
    "list_schedule",
    "lower_bounds",
    "prefetch_plan",
    "prove",
    "simulate",
    "verify",
]
