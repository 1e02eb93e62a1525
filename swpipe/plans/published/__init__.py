"""Planners from the literature and from NVIDIA's recsys-examples, with swpipe's simulator."""

from swpipe.plans.published.joint import JointSearch, joint_search
from swpipe.plans.published.list_scheduling import ListSchedule, list_schedule
from swpipe.plans.published.lookahead import Lookaheads, assign_lookaheads

__all__ = [
    "JointSearch",
    "ListSchedule",
    "Lookaheads",
    "assign_lookaheads",
    "joint_search",
    "list_schedule",
]
