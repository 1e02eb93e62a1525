"""The compiled program of a plan: a list of instructions for each thread group.

``compile_plan`` turns a resolved plan into a ``Program``. The engine runs it; analyses, planners
and profilers read it. An observer is called with the ``Instruction`` of the task that runs.

Stability: provisional. Names may change in a minor release, with an entry in the changelog.
"""

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
    "EventWait",
    "HostWait",
    "Instruction",
    "Lane",
    "Program",
    "compile_plan",
]
