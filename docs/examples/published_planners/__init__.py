"""Planners from the literature and from NVIDIA's recsys-examples, on swpipe's simulator."""

from .joint import JointSearch, joint_search
from .list_scheduling import ListSchedule, list_schedule
from .lookahead import Lookaheads, assign_lookaheads

__all__ = [
    "JointSearch",
    "ListSchedule",
    "Lookaheads",
    "assign_lookaheads",
    "joint_search",
    "list_schedule",
]
