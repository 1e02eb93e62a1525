"""The changes that iterations in flight may have made outside their contexts.

    handed out    i         all its tasks have run
    in flight     i + 1     tasks before the last stage have run, tasks on worker threads may have

A model that is saved now contains these changes, and a resumed run makes them again when it pulls
the same batches. Declarations are trusted; an undeclared task may change anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swpipe.core.messages import listed
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.task import PipelineTask


def runs_early(plan: PipelinePlan, name: str) -> bool:
    """Return whether a task may have run for an iteration that was not handed out."""
    entry = plan.schedule[name]
    return entry.thread_group != DEFAULT_GROUP or entry.stage < plan.max_stage


def early_changes(plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> Iterator[str]:
    """Yield what each task may have changed for iterations in flight."""
    for task in tasks:
        if not runs_early(plan, task.name):
            continue
        if task.undeclared:
            yield f"{task.name!r} does not declare its effects, and may change anything"
        elif changed := sorted({io.state for io in task.io if io.state and "w" in io.mode}):
            yield f"{task.name!r} changes {listed(changed)}"


def refuse_early_changes(in_flight: int, plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> None:
    """Refuse to save while iterations are in flight whose tasks may have changed what is saved.

    Raises:
        RuntimeError: A task may have made such a change; the message names the tasks and the
            remedy.
    """
    if why := [*early_changes(plan, tasks)]:
        raise RuntimeError(
            f"iterations are in flight ({in_flight}), and a run resumed from here could give other "
            f"numbers: {'; '.join(why)} before its iteration is handed out. Call drain() before "
            "you save; or, where this changes nothing that you save, declare it (pure=True, or "
            "io=[DeclaredIO(state=...)] for what the task uses), or pass check=False"
        )
