"""The compiled program of a plan: a list of instructions for each thread group.

``resolve_plan`` derives a plan's dependences and orders, and ``compile_plan`` turns the result into
a ``Program``. The engine runs it; analyses, planners and profilers read it. An observer is called
with the ``Instruction`` of the task that runs.

Stability: provisional. Names may change in a minor release, with an entry in the changelog.
"""

from swpipe.core.dependence import CycleError, Dependence
from swpipe.core.resolved import ResolvedPlan, resolve_plan
from swpipe.program.compiled import (
    ADMIT,
    BEGIN,
    OWN,
    RETIRE,
    SOURCES,
    EventWait,
    HostWait,
    Instruction,
    Lane,
    Program,
    compile_plan,
)

__all__ = [
    "ADMIT",
    "BEGIN",
    "OWN",
    "RETIRE",
    "SOURCES",
    "CycleError",
    "Dependence",
    "EventWait",
    "HostWait",
    "Instruction",
    "Lane",
    "Program",
    "ResolvedPlan",
    "compile_plan",
    "resolve_plan",
]
