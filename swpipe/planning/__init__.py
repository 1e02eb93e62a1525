"""Make plans: simulate, bound, search, and others' planners under the same simulator."""

from swpipe.planning.limits import Limits
from swpipe.planning.modulo.auto import Choice, auto_plan
from swpipe.planning.proof.prover import Proof, prove
from swpipe.planning.published.joint import JointSearch, joint_search
from swpipe.planning.published.list_schedule import ListSchedule, list_schedule
from swpipe.planning.published.lookahead import Lookaheads, assign_lookaheads
from swpipe.planning.simulation.bounds import Bounds, lower_bounds
from swpipe.planning.simulation.simulator import Simulation, simulate

__all__ = [
    "Bounds",
    "Choice",
    "JointSearch",
    "Limits",
    "ListSchedule",
    "Lookaheads",
    "Proof",
    "Simulation",
    "assign_lookaheads",
    "auto_plan",
    "joint_search",
    "list_schedule",
    "lower_bounds",
    "prove",
    "simulate",
]
