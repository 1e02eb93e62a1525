"""Checks that no batch in flight invalidates a checkpoint or another pipeline of the model.

    saved       model and optimizers   as after the batches that were returned
    resumed     batches in flight      are pulled and started again

The effects of a batch in flight must therefore be in its context alone, or be the same when the
batch is run again. Every effect for which this is unknown is named in the error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.inference.early_changes import runs_early
from swpipe.pipeline import SWPipeline
from swpipe.tasks.torchrec._torchrec import PLAIN_TABLES
from swpipe.tasks.torchrec.embedding_tables.table_state import table_parts
from swpipe.tasks.torchrec.shuffling.shuffle import IdentityShuffler, KarmarkarKarpShuffler
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks

SAVED = frozenset({"tables", "dense", "buffers", "optimizer", "gradients"})
"""The declared states that a checkpoint contains, or with which the next step begins."""

WITHOUT_STATE = (type(None), IdentityShuffler, KarmarkarKarpShuffler)
"""The types of shufflers that redistribute each batch independently of the batches before it."""


def check_saving(pipe: SWPipeline[Any], tasks: SparseDistTasks) -> None:
    """Raise an error if a run resumed from the current state would give different numbers.

    Raises:
        RuntimeError: The state cannot be saved now; the message gives the reason and what to do.
    """
    if pipe.in_flight and (why := [*_by_plan(pipe), *_by_parts(pipe.plan, tasks)]):
        raise RuntimeError(
            f"batches are in flight ({pipe.in_flight}), and a run resumed from here would give "
            f"other numbers, as far as is known: {'; '.join(why)}. Call drain() before you save"
        )
    if not pipe.in_flight:
        pipe.state_dict()  # raises if a failure or close() has dropped batches
    # Gradients that were accumulated lie in parameter.grad, which no state_dict saves.
    if rest := tasks.gradients.rest(pipe.state_dict(check=False)["next_iteration"]):
        raise RuntimeError(
            f"gradients of {rest} of {tasks.step.accumulate} batches wait for their step, and no "
            "state_dict has them: save after a step, or call drain() and flush() before you save"
        )


def refusal_to_others(pipe: SWPipeline[Any], tasks: SparseDistTasks) -> Callable[[bool], str]:
    """Return a function that says why another pipeline of the model may not run, or "".

    The function takes whether the other pipeline would train. It returns "" with no batch in
    flight.
    """
    plan = pipe.plan
    # The model's rewrite keeps the function, and may outlive the pipeline.
    weak = weakref.ref(pipe)
    looks_up = tasks.task_of("embedding_forward")
    parts = ("start_input_dist", "wait_input_dist", "prefetch", "embedding_forward")
    used = {plan.schedule[task].thread_group for task in map(tasks.task_of, parts)}
    # If worker threads may run parts of the model between two calls (`within_calls` is false), no
    # other pipeline may use the model at all. Otherwise only updates of rows are a problem.
    threads = [] if plan.within_calls else sorted(used - {"default"})
    early = runs_early(plan, looks_up)

    def refusal(trains: bool) -> str:
        owner = weak()
        if owner is None or not owner.in_flight:
            return ""
        if threads:
            return f"threads ({listed(threads)}) work on them"
        # Gradients of PEC that are deferred until the next batch's ids are known.
        if plan.newer:
            return "updates of rows that the batch after has not are still to come"
        return "they have read rows that this one would change" if early and trains else ""

    return refusal


def _by_plan(pipe: SWPipeline[Any]) -> Iterator[str]:
    """Yield what the plan lets batches in flight read too early, or change."""
    if stale := pipe.plan.stale:
        yield f"the plan reads {listed(sorted(stale))} from before the update of the batch before"
    for task in pipe.tasks:
        changed = sorted(io.state for io in task.io if io.state in SAVED and "w" in io.mode)
        if changed and runs_early(pipe.plan, task.name):
            yield f"{task.name!r} changes {listed(changed)} ahead"


def _by_parts(plan: PipelinePlan, tasks: SparseDistTasks) -> Iterator[str]:
    """Yield the parts that have run for batches in flight and may have changed some state."""
    shuffler = tasks.options.shuffler
    if runs_early(plan, tasks.task_of("copy")) and type(shuffler) not in WITHOUT_STATE:
        yield f"a {type(shuffler).__name__} has shuffled them, and may draw or count"
    # Without an early exchange of ids, no part of the model has run for a batch in flight.
    if not runs_early(plan, tasks.task_of("start_input_dist")):
        return
    if names := [postproc.name for postproc in tasks.rewrite.postprocs]:
        yield f"{listed(names)} have computed inputs for them, and may draw or count"
    looks_up_early = runs_early(plan, tasks.task_of("embedding_forward"))
    for forward in tasks.rewrite.forwards:
        module = forward._module
        # Other modules may, for example, insert unknown ids into a hash table.
        if type(module) not in PLAIN_TABLES:
            yield f"{forward.name} is a {type(module).__name__}, and ids may change it"
        elif looks_up_early and counts(module):
            yield f"the optimizer fused into {forward.name} counts look-ups"
    if tasks.table_state is not None and runs_early(plan, tasks.task_of("prefetch")):
        yield "a prefetch has changed tables whose rows lie in no parameter or buffer"


def counts(module: Any) -> bool:
    """Return whether some fbgemm tables in a module have counted look-ups, as Adam's tables do."""
    # fbgemm keeps the count in the tensor `iter`; it stays 0 for optimizers that do not need it.
    counts = (getattr(part, "iter", None) for part in table_parts([module]))
    return any(isinstance(count, Tensor) and bool(count.any()) for count in counts)
