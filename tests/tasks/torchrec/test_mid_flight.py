"""A state with batches in flight is saved only if it leads to the same numbers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import ref

from torch import nn

from swpipe._values.stateful import modules_in
from swpipe.loops import EvenData
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import (
    IdentityShuffler,
    SparseDistPipeline,
    SparseDistTasks,
    TaskOptions,
    TrainStep,
)
from tests.support.ranks import Ranks
from tests.tasks.torchrec.computing import chain, computing
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    put_back,
    sharded,
)
from tests.tasks.torchrec.test_resuming import Counted
from tests.tasks.torchrec.trial import EXACT, Outcome, create, refusal, to_the_end

STALE = "jagged_semi_sync_sparse_dist"
STEPS = 8


def _made(name: str, model: nn.Module | None = None, **options: Any) -> Any:
    model = sharded(Job()) if model is None else model
    step = TrainStep([dense_optimizer(Job(), model)], accumulate=options.pop("accumulate", 1))
    return create(name, model, step=step, **options)


def _said(pipeline: Any, data: Iterator[Batch] | None = None) -> str:
    """Return the error of saving with batches in flight."""
    data = batches(STEPS) if data is None else data
    return refusal(lambda: (pipeline.progress(data), pipeline.state_dict()))


@contextmanager
def _drained(pipeline: Any) -> Iterator[Any]:
    """Drain the pipeline after the block, and check that this makes saving possible."""
    with pipeline:
        yield pipeline
        pipeline.drain()
        assert pipeline.state_dict()["in_flight"] == 0


def _resumed() -> list[str]:
    """Resume after a drain and a flush within an accumulation."""
    with _made(EXACT[1], seed=3, accumulate=3) as pipeline:
        data = batches(STEPS)
        outputs = [pipeline.progress(data) for _ in range(2)] + pipeline.drain()
        pipeline.flush()
        state, parameters = pipeline.state_dict(), everything(pipeline.tasks.model)
        whole = outputs + to_the_end(pipeline, data)
        wanted = Outcome(whole, everything(pipeline.tasks.model))
    with _made(EXACT[1], seed=9, accumulate=3) as pipeline:
        put_back(pipeline.tasks.model, parameters)
        pipeline.load_state_dict(state)
        assert pipeline.pipe.state_dict()["seed"] == 3
        rest = to_the_end(pipeline, islice(batches(STEPS), state["next_iteration"], None))
        got = Outcome(outputs + rest, everything(pipeline.tasks.model))
    return got.differences(wanted)


def test_a_resumed_accumulation_has_the_numbers_of_one_that_went_on(one_rank: Ranks) -> None:
    """Other resumed trainings are in test_resuming."""
    assert one_rank.run(_resumed) == [[]]


class _Draws(IdentityShuffler):
    """A shuffler of a user's own that draws."""


class _Own:
    """A shuffler of an unknown class."""

    def start(self, batch: Any) -> None:
        """Do nothing."""

    def finish(self, batch: Any, ticket: None) -> Any:
        """Return the batch unchanged."""
        return batch

    def close(self) -> None:
        """Do nothing."""


def _refused() -> dict[str, str]:
    def plan(order: Sequence[str], **changes: Any) -> Any:
        """Return the plan sparse_dist with another entry for the optimizer's step."""
        model = sharded(Job())
        step = TrainStep([dense_optimizer(Job(), model)])
        tasks = SparseDistTasks(model, step, TaskOptions(forward="pipelined"), device=CPU)
        made = plans.sparse_dist()
        last = replace(made.schedule[plans.STEP], **changes)
        schedule = {**made.schedule, plans.STEP: last}
        return SparseDistPipeline(tasks, replace(made, schedule=schedule, order=order))

    def exotic() -> Any:
        pipeline = _made("jagged_sparse_dist")
        for module in pipeline.tasks.rewrite.sharded.values():
            module.__class__ = type("Remapped", (type(module),), {})
        return pipeline

    def counting() -> Any:
        pipeline = _made("jagged_split_sparse_dist")
        (tables,) = pipeline.tasks.rewrite.sharded.values()
        (kernel,) = [part for part in modules_in(tables) if hasattr(part, "iter_cpu")]
        kernel.iter += 1
        return pipeline

    def hidden() -> Any:
        return _made("jagged_prefetch_sparse_dist", tables_state=(dict, print))

    made: dict[str, Callable[[], Any]] = {
        "own shuffler": lambda: _made("jagged_sparse_dist", shuffler=_Own()),
        "subclass": lambda: _made("jagged_sparse_dist", shuffler=_Draws()),
        "known shuffler": lambda: _made("jagged_sparse_dist", shuffler=IdentityShuffler()),
        "worker": lambda: plan(plans.sparse_dist().order, thread_group="worker"),
        "late step": lambda: plan((plans.STEP, *plans.sparse_dist().order[:-1]), stage=3),
        "postproc": lambda: _made("jagged_sparse_dist", computing(chain), pipeline_postproc=True),
        "stale": lambda: _made(STALE),
        "exotic": exotic,
        "counting": counting,
        "hidden": hidden,
    }
    found = {}
    for what, make in made.items():
        with _drained(make()) as pipeline:
            found[what] = _said(pipeline)
    return found


def test_what_may_have_run_ahead_is_not_saved_in_mid_flight(one_rank: Ranks) -> None:
    """The error has the name and an alternative, which works."""
    (said,) = one_rank.run(_refused)
    assert said.pop("known shuffler") == "nothing raised"
    expected = {
        "own shuffler": "a _Own has shuffled them",
        "subclass": "a _Draws has shuffled them",
        "worker": "'OptimStep' changes dense, gradients, optimizer ahead",
        "late step": "'DenseBackward' touches state 'buffers', state 'dense', ",
        "postproc": " have computed inputs for them",
        "stale": "the plan reads optimizer, tables from before the update",
        "exotic": "is a Remapped, and ids may change it",
        "counting": "counts look-ups",
        "hidden": "a prefetch has changed tables",
    }
    assert said.keys() == expected.keys()
    for what, part in expected.items():
        assert part in said[what]
        if what != "late step":  # which no loop with a body may have
            assert said[what].endswith("Call drain() before you save")


def _accumulates() -> list[Any]:
    with _made("jagged_sparse_dist", accumulate=3) as pipeline:
        data = batches(STEPS)
        found: list[Any] = [_said(pipeline, data) for _ in range(3)]
        pipeline.drain()
        found.append(refusal(pipeline.state_dict))
        pipeline.flush()
        return [*found, pipeline.state_dict()["next_iteration"]]


def test_an_unfinished_step_is_not_saved(one_rank: Ranks) -> None:
    """Its gradients are in no state_dict."""
    ((first, second, third, drained, number),) = one_rank.run(_accumulates)
    assert "gradients of 1 of 3 batches wait for their step" in first
    assert "gradients of 2 of 3 batches" in second
    assert third == "nothing raised"
    assert drained.endswith("save after a step, or call drain() and flush() before you save")
    assert number == 5


def _warned() -> list[str]:
    with _made("jagged_sparse_dist", accumulate=2) as pipeline:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in (0, 4):
                pipeline.load_state_dict({"next_iteration": number, "seed": 0})
        return [str(one.message) for one in caught]


def test_a_first_step_that_is_rounded_otherwise_is_told(one_rank: Ranks, two_ranks: Ranks) -> None:
    """DDP reduces the first batch of a process differently on several ranks."""
    assert one_rank.run(_warned) == [[]]
    for said in two_ranks.run(_warned):
        assert len(said) == 1
        assert "may differ in the last bits" in said[0]


def _pulled(own: bool) -> list[int]:
    """Return, after each step, the number of batches missing in the state."""
    found = []
    with _made("jagged_prefetch_sparse_dist") as pipeline:
        data = Counted(batches(STEPS))
        even = EvenData("stop", ahead=3)
        given = even.over(data) if own else data
        for _ in range(STEPS):
            pipeline.progress(given)
            state = pipeline.state_dict()
            found.append(data.pulled - state["next_iteration"] - state["in_flight"])
        pipeline.drain()
    even.close()
    return found


def test_batches_that_were_pulled_early_are_in_flight(two_ranks: Ranks) -> None:
    """The ranks agree on the end of the data, by the pipeline or by the user's EvenData."""
    for own in (False, True):
        assert two_ranks.run(_pulled, own) == [[0] * STEPS] * 2


def _kept_when_closed() -> tuple[bool, str]:
    gc.disable()
    try:
        with _made("jagged_prefetch_sparse_dist") as pipeline:
            pipeline.progress(batch for batch in batches(STEPS))
            agreed = ref(pipeline.pipe._driver._passes.last)
            assert agreed().waiting == 1
        return agreed() is not None, refusal(pipeline.state_dict)
    finally:
        gc.enable()


def test_a_closed_pipeline_lets_go_of_what_was_pulled_early_at_once(two_ranks: Ranks) -> None:
    """Otherwise a forked worker of a loader may collect it, with its exchange, and abort.

    The pipeline has no state any more: it has dropped its batches.
    """
    for kept, said in two_ranks.run(_kept_when_closed):
        assert not kept
        assert "were dropped by a failure or by close()" in said
