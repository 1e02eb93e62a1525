"""What iterations in flight may have changed outside their contexts.

    handed out    i         all its tasks have run
    in flight     i + 1     those before the last stage have run, and those on worker threads may

What these have changed is in a model that is saved now, and is changed again when a resumed run
pulls their batches again. Tasks are taken at their word; one that says nothing may change anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swpipe.core.messages import listed
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.task import PipelineTask


def runs_early(plan: PipelinePlan, name: str) -> bool:
    """Whether a task may have run for an iteration that was not handed out."""
    entry = plan.schedule[name]
    return entry.thread_group != DEFAULT_GROUP or entry.stage < plan.max_stage


def early_changes(plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> Iterator[str]:
    """What each task may have changed for iterations in flight."""
    for task in tasks:
        if not runs_early(plan, task.name):
            continue
        if task.undeclared:
            yield f"{task.name!r} says nothing of what it touches, and may change anything"
        elif changed := sorted({io.state for io in task.io if io.state and "w" in io.mode}):
            yield f"{task.name!r} changes {listed(changed)}"


def refuse_early_changes(in_flight: int, plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> None:
    """Refuse to save in mid-flight where tasks may have run ahead of what is saved.

    Raises:
        RuntimeError: It names the tasks, and what to do.
    """
    if why := [*early_changes(plan, tasks)]:
        raise RuntimeError(
            f"iterations are in flight ({in_flight}), and a run resumed from here could give other "
            f"numbers: {'; '.join(why)} before its iteration is handed out. Call drain() before "
            "you save; or, where this changes nothing that you save, declare it (pure=True, or "
            "io=[DeclaredIO(state=...)] for what the task uses), or pass check=False"
        )
