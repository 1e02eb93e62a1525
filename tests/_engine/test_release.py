"""Under a plan with ``keep``, an attribute is deleted after its last user, and not before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.context import TypedContext
from swpipe.core.drawing import format_stages
from swpipe.core.effects import Effects, Location
from swpipe.core.resolved import resolve_plan
from swpipe.device import CpuDevice, copy_task
from swpipe.errors import PlanError
from swpipe.profiler import TaskProfiler
from tests.support.sequencer import await_event

BATCHES = 8


class Value:
    """An object with a number that supports weak references."""

    def __init__(self, number: int) -> None:
        self.number = number


class Job:
    """Four tasks: two of them use ``x``, the last one ``y``, the first one ``batch``.

    Attributes:
        alive: (task, iteration) to which values of the iteration were alive when it began.
        odd: An additional action of a task, by its name.
    """

    def __init__(self) -> None:
        self.alive: dict[tuple[str, int], str] = {}
        self.odd: dict[str, Callable[[Any], object]] = {}
        self._made: dict[int, dict[str, weakref.ref[Any]]] = {}

    def batches(self, first: int = 0) -> Iterable[Value]:
        """Return batches without other references, for iterations from ``first`` on."""
        return (self._batch(i, first + i) for i in range(BATCHES))

    def _batch(self, i: int, iteration: int) -> Value:
        batch = Value(i)
        self._made[iteration] = {"batch": weakref.ref(batch)}
        return batch

    def _begin(self, task: str, ctx: Any) -> None:
        made = self._made[ctx.iter_idx]
        there = " ".join(name for name, value in made.items() if value() is not None)
        self.alive[task, ctx.iter_idx] = there
        self.odd.get(task, lambda ctx: None)(ctx)

    def _make(self, ctx: Any, name: str, value: Value) -> None:
        self._made[ctx.iter_idx][name] = weakref.ref(value)
        setattr(ctx, name, value)

    def read(self, ctx: Any) -> None:
        self._begin("read", ctx)
        self._make(ctx, "x", Value(ctx.batch.number + 1))

    def use(self, ctx: Any) -> None:
        self._begin("use", ctx)
        self._make(ctx, "y", Value(2 * ctx.x.number))

    def use_again(self, ctx: Any) -> None:
        self._begin("use again", ctx)
        ctx.sum = ctx.x.number + 1

    def end(self, ctx: Any) -> None:
        self._begin("end", ctx)
        ctx.loss = ctx.y.number + ctx.sum

    def tasks(self, **reads: Any) -> list[PipelineTask]:
        """Return the tasks with their declared ``reads``, some of which may be replaced."""
        said = {"read": ["batch"], "use": ["x"], "use again": ["x"], "end": ["y", "sum"], **reads}
        functions = {"read": self.read, "use": self.use, "use again": self.use_again}
        functions["end"] = self.end
        return [PipelineTask(name, fn, reads=said[name]) for name, fn in functions.items()]


DEPS = [("use", "read"), ("use again", "read"), ("end", "use"), ("end", "use again")]
LOSSES = [2 * (i + 1) + i + 2 for i in range(BATCHES)]


def plan(*stages: int, groups: str = "dddd") -> PipelinePlan:
    """Return a plan with these stages and thread groups; "d" is the caller's."""
    names = ("read", "use", "use again", "end")
    entries = {
        name: TaskSchedule(stage, thread_group="default" if group == "d" else group)
        for name, stage, group in zip(names, stages, groups, strict=True)
    }
    return PipelinePlan(entries, deps=DEPS, pipeline_depth=4)


PLANS = {
    "one thread": plan(0, 0, 0, 0),
    "a thread ahead": plan(0, 1, 1, 2, groups="addd"),
    "a thread each": plan(0, 1, 1, 2, groups="abcd"),
    "all on workers": plan(0, 0, 1, 3, groups="aabb"),
}


def keeping(name: str, *attributes: str) -> PipelinePlan:
    """Return the named plan, with ``keep`` set to these attributes."""
    return replace(PLANS[name], keep=attributes)


@pytest.mark.parametrize("name", PLANS)
def test_a_value_goes_after_its_last_user(name: str) -> None:
    """The values in ``keep`` stay, and no others."""
    job = Job()
    with SWPipeline(keeping(name, "loss"), job.tasks(), device="cpu") as pipe:
        found = [(ctx.iter_idx, vars(ctx)) for ctx in pipe.iterate(job.batches())]
    assert found == [(i, {"iter_idx": i, "loss": LOSSES[i]}) for i in range(BATCHES)]
    end = {job.alive["end", i] for i in range(BATCHES)}
    first = {job.alive["use", i] for i in range(BATCHES)}
    assert end == {"y"}  # x has gone, and the batch
    assert first == {"x"}


def test_without_keep_all_stays() -> None:
    """The context of such a run lists its values."""
    job = Job()
    with SWPipeline(PLANS["one thread"], job.tasks(), device="cpu") as pipe:
        found = [set(vars(ctx)) for ctx in pipe.iterate(job.batches())]
    assert found == [{"batch", "iter_idx", "x", "y", "sum", "loss"}] * BATCHES
    assert {job.alive["end", i] for i in range(BATCHES)} == {"batch x y"}


class Holding(CpuDevice):
    """A device that notes the values that it has to hold."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def hold(self, values: Iterable[Any], streams: Iterable[Any]) -> None:
        self.held += [value.number for value in values if isinstance(value, Value)]


@pytest.mark.parametrize("serially", [True, False])
def test_what_goes_at_once_is_held_for_the_stream_that_reads_it(serially: bool) -> None:
    """The value may have been made on another stream, for example by a loader."""
    job, device = Job(), Holding()
    with SWPipeline(keeping("one thread", "loss"), job.tasks(), device=device) as pipe:
        batch = next(iter(job.batches()))
        ctx = pipe.run_one_serial_iter(batch) if serially else next(iter(pipe.iterate([batch])))
    assert vars(ctx) == {"iter_idx": 0, "loss": LOSSES[0]}
    assert device.held == [0, 1, 2]  # the batch, x, y


def test_a_task_that_says_nothing_may_use_anything() -> None:
    """Therefore all values wait for the task."""
    job = Job()
    tasks = job.tasks(end=None)
    with SWPipeline(keeping("a thread ahead", "loss"), tasks, device="cpu") as pipe:
        assert [ctx.loss for ctx in pipe.iterate(job.batches())] == LOSSES
    assert {job.alive["end", i] for i in range(BATCHES)} == {"batch x y"}


def test_what_no_task_says_stays_to_the_end_of_the_iteration() -> None:
    """A task may set and read it, while another task ends that might use anything."""
    job = Job()
    own, begun = ([threading.Event() for _ in range(BATCHES)] for _ in range(2))

    def use(ctx: Any) -> None:
        ctx.own = Value(7)
        own[ctx.iter_idx].set()
        if ctx.iter_idx + 1 < BATCHES:  # then "use again" is done with this iteration
            await_event(begun[ctx.iter_idx + 1], "the next run of 'use again'")
        assert ctx.own.number == 7

    def use_again(ctx: Any) -> None:
        begun[ctx.iter_idx].set()
        await_event(own[ctx.iter_idx], "ctx.own")

    job.odd |= {"use": use, "use again": use_again}
    tasks = job.tasks(**{"use again": None})
    with SWPipeline(keeping("a thread each", "loss"), tasks, device="cpu") as pipe:
        found = [vars(ctx) for ctx in pipe.iterate(job.batches())]
    assert found == [{"iter_idx": i, "loss": LOSSES[i]} for i in range(BATCHES)]


def test_what_was_recorded_counts_as_said() -> None:
    """``effects`` say which attributes tasks use, where the tasks do not."""
    used = {
        "read": ("batch", "x"),
        "use": ("x", "y"),
        "use again": ("x", "sum"),
        "end": ("y sum", "loss"),
    }
    effects = {
        name: Effects(
            *(frozenset(Location(n, persistent=False) for n in names.split()) for names in both)
        )
        for name, both in used.items()
    }
    job = Job()
    tasks = job.tasks(**dict.fromkeys(used))
    with SWPipeline(keeping("one thread", "loss"), tasks, device="cpu", effects=effects) as pipe:
        assert [ctx.loss for ctx in pipe.iterate(job.batches())] == LOSSES
    assert {job.alive["end", i] for i in range(BATCHES)} == {"y"}


# ------------------------------------------------------------------ what is needed after it went


def test_an_attribute_that_went_is_an_error_that_names_keep() -> None:
    """This holds for the loop's body, and for a task that reads an undeclared attribute."""
    job = Job()
    with SWPipeline(keeping("one thread", "loss"), job.tasks(), device="cpu") as pipe:
        ctx = next(iter(pipe.iterate(job.batches())))
        with pytest.raises(RuntimeError) as caught:
            _ = ctx.x
        assert str(caught.value) == (
            "iteration 0 has no attribute 'x' any more: it was released after its declared or "
            "recorded users, 'use', 'use again', because keep=['loss'] does not name it. Add it to "
            "keep if it is read after the iteration, or else to reads of the task that reads it"
        )
        for ask in (lambda: hasattr(ctx, "x"), lambda: getattr(ctx, "x", 0)):
            with pytest.raises(RuntimeError, match="'x' any more: .*Add it to keep"):
                ask()
        assert not hasattr(ctx, "never set")
    job.odd["end"] = lambda ctx: ctx.x
    with SWPipeline(keeping("one thread", "loss"), job.tasks(), device="cpu") as pipe:
        with pytest.raises(RuntimeError, match=r"'x' any more: it was released after its declared"):
            pipe.run(job.batches())


def test_a_use_that_is_not_said_is_refused() -> None:
    """It is refused also if the value happens to exist."""
    job = Job()
    job.odd["use again"] = lambda ctx: ctx.batch
    plan = keeping("a thread each", "loss", "batch")  # what is kept need not be said
    with SWPipeline(plan, job.tasks(), device="cpu") as pipe:
        assert [ctx.batch.number for ctx in pipe.iterate(job.batches())] == [*range(BATCHES)]
    plan = keeping("a thread each", "loss", "y")
    tasks = job.tasks(end=["y", "sum", "batch"])  # so that the batch is there
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        with pytest.raises(PlanError) as caught:
            pipe.run(job.batches())
    assert (
        "task 'use again' on iteration 0 used batch, which it does not declare, so that the plan's "
        "keep may release it too early. Add it to reads of task 'use again', or to keep"
    ) in str(caught.value)


def test_a_name_that_no_iteration_has_is_told_once() -> None:
    """The warning comes once per run."""
    job = Job()
    with SWPipeline(keeping("a thread ahead", "los"), job.tasks(), device="cpu") as pipe:
        with pytest.warns(RuntimeWarning) as caught:
            for _ctx in pipe.iterate(job.batches()):
                pass
    (one,) = caught
    assert str(one.message) == (
        "keep names los, which the context of iteration 0 did not have (it had: batch, iter_idx, "
        "loss, sum, x, y): correct the name, or ignore this warning if a later iteration has it"
    )


def test_what_the_class_has_a_value_for_stays() -> None:
    """A later reader would otherwise get the class's value silently."""

    class Context(TypedContext):
        sum: int = -1

        @property
        def twice(self) -> int:
            return 2 * self.loss

    job = Job()
    plan = keeping("a thread ahead", "loss")
    with SWPipeline(plan, job.tasks(), device="cpu", context=Context) as pipe:
        found = [(ctx.sum, ctx.twice) for ctx in pipe.iterate(job.batches())]
    assert found == [(i + 2, 2 * loss) for i, loss in enumerate(LOSSES)]


# ------------------------------------------------------------------ with the rest of swpipe


def test_overlap_keeps_what_its_body_reads() -> None:
    """If the body reads another attribute, the error names ``keep``."""

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch + 1

    def use(ctx: Any) -> None:
        ctx.loss = 2 * ctx.x

    tasks = [
        PipelineTask("decode", decode, pure=True, reads=["batch"]),
        PipelineTask("use", use, reads=["x"]),
    ]
    with swpipe.overlap([1, 2], tasks, device="cpu", keep=["loss"]) as loop:
        assert loop.overlap.plan.keep == ("loss",)
        assert [ctx.loss for ctx in loop] == [4, 6]
        for ctx in loop:
            assert [*vars(ctx)] == ["iter_idx", "loss"]
            with pytest.raises(RuntimeError, match="'x' any more: .*Add it to keep"):
                _ = ctx.x


def test_a_copy_says_what_it_copies() -> None:
    """Therefore nothing else waits for it."""
    assert copy_task("cpu").reads == ("batch",)
    assert copy_task("cpu", "x", "y").reads == ("x", "y")


def test_a_shortcut_finds_what_it_needs() -> None:
    """A profile of each task, and a run with a replaced task, work under such a plan."""
    tasks = [
        PipelineTask("scale", lambda ctx: setattr(ctx, "x", 2 * ctx.batch), reads=["batch"]),
        PipelineTask("sum", lambda ctx: setattr(ctx, "loss", ctx.x.sum()), reads=["x"]),
    ]
    plan = replace(PipelinePlan.serial(tasks), keep=["loss"])
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        (found,) = TaskProfiler(pipe).profile_many([torch.ones(2)], num_rounds=2)
        assert {*found.tasks} == {"scale", "sum"}
        pipe.enable_shortcut("scale")
        assert [float(ctx.loss) for ctx in pipe.iterate([torch.ones(2)] * 3)] == [4.0] * 3


@pytest.mark.parametrize(
    ("keep", "first"),
    [(None, "depth 4"), (["loss", "x"], "depth 4, keeps loss, x"), ([], "depth 4, keeps none")],
)
def test_a_plan_tells_what_it_keeps(keep: list[str] | None, first: str) -> None:
    """The plan's table has a column for it."""
    plan = replace(PLANS["one thread"], keep=keep)
    assert format_stages(resolve_plan(plan)).partition("\n")[0] == first
