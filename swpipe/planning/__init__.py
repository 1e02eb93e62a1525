"""Planners: simulation of plans, lower bounds on the interval, and the search for a plan."""

from swpipe.planning.limits import Limits
from swpipe.planning.modulo.auto import Choice, auto_plan
from swpipe.planning.modulo.bounds import Bounds, lower_bounds
from swpipe.planning.ranks import Ranks, RankStep
from swpipe.planning.simulation.simulator import Simulation, simulate

__all__ = [
    "Bounds",
    "Choice",
    "Limits",
    "RankStep",
    "Ranks",
    "Simulation",
    "auto_plan",
    "lower_bounds",
    "simulate",
]
