"""Figures of the published zero-bubble V scheduler, with cases for each of its rules.

Times are in units of the published costs; memory is f = 303104, b = -172032, w = -131072, and the
limit 2 * n_stage * f.
"""

from __future__ import annotations

from typing import NamedTuple

from swpipe.plans.pipeline_parallel import PipelineCosts, PipelineGraph

MEMORY = (303104, -172032, -131072)


class Published(NamedTuple):
    """One configuration: costs, lower bounds, the published method's figures, torch's bubble."""

    n: int
    m: int
    f: int
    b: int
    w: int
    c: int
    least_bubble: int
    least_makespan: int
    bubble: int
    makespan: int
    torch_bubble: int

    @property
    def costs(self) -> PipelineCosts:
        """The costs, with the default limit."""
        return PipelineCosts(self.f, self.b, self.w, self.c, *MEMORY)

    @property
    def graph(self) -> PipelineGraph:
        """The published generator."""
        return PipelineGraph(self.n, self.m, self.f, self.b, self.w, self.c, *MEMORY)


_PUBLISHED = (
    (2, 2, 1000, 1000, 1000, 50, 1100, 13150, 1100, 13150, 2200),
    (2, 6, 1000, 1200, 800, 50, 300, 37350, 600, 37450, 1000),
    (4, 4, 1000, 1000, 1000, 1, 3006, 27009, 3006, 28010, 6012),
    (4, 12, 1000, 1000, 1000, 50, 300, 75450, 700, 75750, 800),
    (8, 8, 1000, 1000, 1000, 50, 7700, 56050, 7700, 59200, 15400),
    (8, 16, 1000, 1000, 1000, 1, 14, 103021, 40, 103035, 40),
    (8, 16, 1000, 1000, 1000, 50, 700, 104050, 2500, 104750, 2000),
    (8, 24, 1000, 1200, 800, 1, 1414, 152421, 4842, 152435, 5640),
    (16, 32, 1000, 1200, 800, 50, 4500, 212250, 15900, 214400, 16400),
)  # fmt: skip
PUBLISHED = [Published(*row) for row in _PUBLISHED]
