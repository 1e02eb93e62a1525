"""The context of a batch: the tasks that fill and empty each field; never shared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.plans.torchrec.sparse_dist import PLANS, TASKS
from swpipe.tasks.torchrec import SparseDistTasks, TrainStep
from swpipe.tasks.torchrec.forwards import SparseDistContext
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import Job, batches, dense_optimizer, sharded


class FieldUse(NamedTuple):
    """The task that fills a field of the context, and the task that empties it.

    ``reader`` is for the split forward. Under the pipelined forward, EmbForward reads what
    EmbPrefetch reads here.
    """

    field: str
    writer: str
    reader: str


FIELDS = (
    FieldUse("inputs", "EmbInputDistStart", "DenseForward"),
    FieldUse("fused_splits_awaitables", "EmbInputDistStart", "EmbInputDistWait"),
    FieldUse("module_contexts", "EmbInputDistStart", "EmbPrefetch"),
    FieldUse("input_dist_tensors_requests", "EmbInputDistWait", "EmbPrefetch"),
    FieldUse("module_input_post_prefetch", "EmbPrefetch", "EmbForward"),
    FieldUse("module_contexts_post_prefetch", "EmbPrefetch", "EmbForward"),
    FieldUse("embeddings", "EmbForward", "DenseForward"),
    FieldUse("seams", "DenseForward", "EmbBackward"),
)
"""Every field that is used, besides ``index`` and ``version``; all others stay empty."""

QUIET = {
    "events",
    "input_dist_splits_requests",
    "postproc_fwd_results",
    "module_contexts_next_batch",
    "module_input_post_prefetch_next_batch",
    "module_contexts_post_prefetch_next_batch",
}
"""Fields that are empty between tasks."""


def _made(plan: PipelinePlan, watch: Any) -> SWPipeline:
    """A pipeline that calls ``watch(task, ctx)`` after each task."""
    model = sharded(Job(modules=2))
    tasks = SparseDistTasks(model, TrainStep([dense_optimizer(Job(), model)]), device="cpu")

    def watched(task: PipelineTask) -> PipelineTask:
        def fn(ctx: Any) -> None:
            task.fn(ctx)
            watch(task.name, ctx)

        return PipelineTask(task.name, fn, task.io)

    return SWPipeline(plan, [watched(task) for task in tasks.tasks()], device="cpu")


def _life(plan: str) -> list[dict[str, set[str]]]:
    """For each batch: field to the tasks after which it was filled, and not before."""
    filled: list[dict[str, list[bool]]] = [{} for _ in range(3)]

    def watch(task: str, ctx: Any) -> None:
        if hasattr(ctx, "pipeline"):
            for field in fields(SparseDistContext):
                value = getattr(ctx.pipeline, field.name)
                if not isinstance(value, int | None):
                    filled[ctx.iter_idx].setdefault(field.name, []).append((task, bool(value)))

    with _made(PLANS[plan](), watch) as pipe:
        pipe.run(batches(3))
    return [
        {name: {task for task, full in seen if full} for name, seen in of_batch.items()}
        for of_batch in filled
    ]


def _between(writer: str, reader: str) -> set[str]:
    """Tasks after which a field is full: from its writer on, until its reader has run."""
    return set(TASKS[TASKS.index(writer) : TASKS.index(reader)])


def test_each_field_is_filled_and_emptied_where_the_table_says(two_ranks: Ranks) -> None:
    """For every batch, serially and under the deepest plan; all other fields stay empty."""
    # What is handed over within one task is not seen from outside of it.
    expected = {use.field: _between(use.writer, use.reader) for use in FIELDS}
    for plan in ("serial", "split"):
        for of_batch in two_ranks.run(_life, plan)[0]:
            assert {name: of_batch[name] for name in expected} == expected
            assert all(of_batch[name] == set() for name in QUIET)


def test_the_table_names_every_field_that_is_used() -> None:
    """With the quiet ones, the index and the version, it is complete."""
    named = {use.field for use in FIELDS} | QUIET | {"index", "version"}
    assert named == {field.name for field in fields(SparseDistContext)}
