"""What iterations in flight may have changed outside their contexts.

    handed out    i         all its tasks have run
    in flight     i + 1     those before the last stage have run, and those on worker threads may

What these have changed is in a model that is saved now, and is changed again when a resumed run
pulls their batches again. A task that declares states is taken at its word. Any other may change
what its code can reach and training changes, and the Python values that it assigns to; not seen are
tensors without gradients, and the items of lists and dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from swpipe._state.reach import reach_of
from swpipe._state.reached import Reach
from swpipe._tensors.stateful import is_generator
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
        states = {io.state: io.mode for io in task.io if io.state is not None}
        if states:
            if changed := sorted(name for name, mode in states.items() if "w" in mode):
                yield f"{task.name!r} changes {listed(changed)}"
        elif found := sorted({*_trained(reach := reach_of(task)), *_assigned(reach)}):
            yield f"{task.name!r} may change {listed(found, most=3)}"


def refuse_early_changes(in_flight: int, plan: PipelinePlan, tasks: Sequence[PipelineTask]) -> None:
    """Refuse to save in mid-flight where tasks may have run ahead of what is saved.

    Raises:
        RuntimeError: It names the tasks, and what to do.
    """
    if why := [*early_changes(plan, tasks)]:
        raise RuntimeError(
            f"iterations are in flight ({in_flight}), and a run resumed from here could give other "
            f"numbers: {'; '.join(why)} before its iteration is handed out. Call drain() before "
            "you save; or, where this changes nothing that you save, declare what the task uses "
            "(DeclaredIO(state=...)), or pass check=False"
        )


def _trained(reach: Reach) -> Iterator[str]:
    """What training changes, or drawing, of what the code can reach."""
    for number, names in reach.wholes.items():
        one = reach.holders[number]
        if isinstance(one, torch.nn.Module):
            changes = any(each.requires_grad for each in one.parameters()) or (
                one.training and any(True for _ in one.buffers())
            )
        elif isinstance(one, torch.Tensor):
            changes = one.requires_grad
        else:
            changes = isinstance(one, torch.optim.Optimizer) or is_generator(one)
        if changes:
            yield min(names) or type(one).__name__


def _assigned(reach: Reach) -> Iterator[str]:
    return (path for place, path in reach.places.items() if place.name in reach.stores)
