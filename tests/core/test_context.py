"""Context classes of the user: in every kind of run, and what such a class may not have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from swpipe import (
    PipelinePlan,
    PipelineTask,
    SWPipeline,
    TaskProfiler,
    TaskSchedule,
    TypedContext,
    autotune,
    task,
)
from swpipe.inference import Recording, record
from tests.device.virtual import VirtualDevice
from tests.support.notes import Notes

BATCHES = [1, 2, 3, 4]


class Ctx(TypedContext):
    """A context with attributes, a default, a method, and a property with a setter."""

    x: torch.Tensor
    y: torch.Tensor
    hits: int = 0

    def double(self) -> torch.Tensor:
        """Return twice ``x``."""
        return 2 * self.x

    @property
    def total(self) -> float:
        """The value of ``y``."""
        return float(self.y.sum())

    @total.setter
    def total(self, value: float) -> None:
        self.y = torch.full((2,), value / 2)

    @total.deleter
    def total(self) -> None:
        del self.y


@task
def make(ctx: Ctx) -> None:
    """Set ``x``."""
    ctx.x = torch.full((2,), float(ctx.batch))


@task
def compute(ctx: Ctx) -> None:
    """Read ``x`` by a method, and set ``y`` by a property."""
    ctx.total = float(ctx.double().sum())


@task
def count(ctx: Ctx) -> None:
    """Read ``y`` by a property; read and set an attribute with a default."""
    ctx.hits = ctx.hits + int(ctx.total)


TASKS = [make, compute, count]
PLAN = PipelinePlan(
    {
        make: TaskSchedule(stage=0, thread_group="io"),
        compute: TaskSchedule(stage=1),
        count: TaskSchedule(stage=2, thread_group="io"),
    },
    deps=[(compute, make), (count, compute)],
)
HITS = [4 * batch for batch in BATCHES]


def pipeline(plan: PipelinePlan = PLAN) -> SWPipeline[Ctx]:
    """Return a pipeline with contexts of the class above."""
    return SWPipeline(plan, TASKS, device="cpu", context=Ctx)


def test_pipelined_and_serial_iterations_have_contexts_of_the_class() -> None:
    """This holds for every way to get the context; methods and properties work."""
    with pipeline() as pipe:
        found = [
            [*pipe.iterate(BATCHES)],
            [*filter(None, map(pipe.push, BATCHES)), *pipe.flush()],
            [pipe.run_one_serial_iter(batch) for batch in BATCHES],
        ]
    for contexts in found:
        assert [type(ctx) for ctx in contexts] == [Ctx] * len(BATCHES)
        assert [ctx.hits for ctx in contexts] == HITS
        assert [ctx.total for ctx in contexts] == HITS
        assert repr(contexts[0]).startswith("Ctx(iter_idx=")


def test_replays_and_traces_work_with_the_class() -> None:
    """A shortcut caches what a property's setter stored."""
    with pipeline() as pipe, pipe.trace() as trace:
        with pipe.shortcut("compute"):
            assert [ctx.hits for ctx in pipe.iterate([1, 2, 3])] == [4, 4, 4]
    assert {span.task for span in trace.spans} >= {"make", "compute", "count"}


def test_profiles_and_autotune_work_with_the_class() -> None:
    """They make pipelines and recordings with contexts of the class."""
    with pipeline() as pipe:
        result = TaskProfiler(pipe).profile(1, num_warmup=1, num_measure=1, num_rounds=2)
    assert set(result.exposed_s) == {"make", "compute", "count"}
    tuned = autotune(TASKS, BATCHES, device="cpu", context=Ctx)
    with pipeline(tuned.plan) as pipe:
        assert [ctx.hits for ctx in pipe.iterate(BATCHES)] == HITS


def recorded(*tasks: PipelineTask, context: type[TypedContext] | None = Ctx) -> Recording:
    """Return a recording with contexts of a class."""
    return record(tasks, 1, device="cpu", context=context)


def effects(recording: Recording, name: str) -> tuple[set[str], set[str]]:
    """Return the attributes that a task reads and writes."""
    found = recording.effects[name]
    reads, writes = (
        {str(place) for place in places if not place.persistent}
        for places in (found.reads, found.writes)
    )
    return reads, writes


def test_a_recording_sees_what_methods_and_properties_do() -> None:
    """It lists the attributes behind them, and neither methods nor properties themselves.

    What every class has is no attribute. One with a default in the class is, before and after some
    task sets it.
    """
    seen = Notes()

    @task
    def drop(ctx: Ctx) -> None:
        ctx.x = torch.tensor(ctx.hits)
        del ctx.total
        seen.append(ctx.__doc__)

    found = recorded(*TASKS, drop)
    assert effects(found, "make") == ({"ctx.batch"}, {"ctx.x"})
    assert effects(found, "compute") == ({"ctx.x"}, {"ctx.y"})
    assert effects(found, "count") == ({"ctx.y", "ctx.hits"}, {"ctx.hits"})
    assert effects(found, "drop") == ({"ctx.hits"}, {"ctx.x", "ctx.y"})
    assert {("compute", "make"), ("count", "compute"), ("drop", "count")} <= {
        *found.dependences().deps
    }
    assert seen.read() == [Ctx.__doc__] * 4


def test_a_recorded_context_is_of_the_class_and_made_like_it() -> None:
    """``isinstance`` holds, ``__init__`` has run, and its attributes are not those of a task.

    The task that first computes a cached property counts as its producer.
    """

    class Made(TypedContext):
        def __init__(self, batch: Any, iter_idx: int) -> None:
            super().__init__(batch, iter_idx)
            self.losses: list[float] = []

        @cached_property
        def square(self) -> int:
            return int(self.batch**2)

    @task
    def add(ctx: Made) -> None:
        classes.append((isinstance(ctx, Made), type(ctx).__name__))
        ctx.losses.append(float(ctx.square))

    @task
    def last(ctx: Made) -> None:
        ctx.losses[-1] += ctx.square

    classes = Notes()
    found = recorded(add, last, context=Made)
    assert classes.read() == [(True, "Made")] * 4
    assert {"ctx.losses", "ctx.square"} <= effects(found, "add")[1]
    assert "ctx.square" in effects(found, "last")[0]
    assert found.dependences().deps == (("last", "add"),)
    tasks = [add, last]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu", context=Made) as pipe:
        assert [ctx.losses for ctx in pipe.iterate([1, 2])] == [[2.0], [8.0]]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_context_makes_on_the_device_is_there_for_every_stream(seed: int) -> None:
    """It is made on the caller's stream, with a batch on the host: other streams wait for it."""
    device = VirtualDevice(seed=seed)

    class Made(TypedContext):
        def __init__(self, batch: Any, iter_idx: int) -> None:
            super().__init__(batch, iter_idx)
            self.start = device.launch(lambda: batch)

    @task
    def add(ctx: Any) -> None:
        ctx.sum = device.launch(lambda value: value + 1, ctx.start)

    plan = PipelinePlan({add: TaskSchedule(stream="side")}, pipeline_depth=2)
    with SWPipeline(plan, device=device, context=Made) as pipe:
        assert [device.read(ctx.sum) for ctx in pipe.iterate(BATCHES)] == [2, 3, 4, 5]
    device.check()


def test_an_attribute_that_is_not_set_is_named() -> None:
    """A declared attribute that no task has set yet raises like any other."""
    with pytest.raises(AttributeError, match="has no attribute 'x' .it has: batch, iter_idx"):
        Ctx(None, 0).double()


@dataclass
class Data(TypedContext):
    """A context class that is a dataclass."""

    loss: float


class Slotted(TypedContext):
    """A context class with slots."""

    __slots__ = ("loss",)


class Shared(TypedContext):
    """A context class with a list that all iterations share."""

    losses: list[float] = []  # noqa: RUF012


class Greedy(TypedContext):
    """A context class whose ``__init__`` takes a third argument."""

    def __init__(self, batch: Any, iter_idx: int, loss: float) -> None:
        super().__init__(batch, iter_idx)
        self.loss = loss


REFUSED = [
    (Data, "Data: it is a dataclass.*Leave @dataclass out: annotated attributes are enough"),
    (Slotted, "Slotted: 'loss' is in __slots__.*Leave __slots__ out"),
    (Shared, "Shared: 'losses' is a list of the class.*Set it in __init__, or in a task"),
    (Greedy, r"Greedy: it is called with \(batch, iter_idx\).*missing.*'loss'"),
    (dict, "context is <class 'dict'>: give a subclass of TypedContext"),
    (Ctx(None, 0), r"context is Ctx\(.*: give a subclass of TypedContext"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_class_that_cannot_be_used_is_refused(given: Any, text: str) -> None:
    """The pipeline and the recording refuse it, and say what to write instead."""
    with pytest.raises(TypeError, match=text):
        SWPipeline(PLAN, TASKS, device="cpu", context=given)
    with pytest.raises(TypeError, match=text):
        record(TASKS, 1, device="cpu", context=given)


def test_all_that_is_wrong_with_a_class_is_told_at_once() -> None:
    """The error has one line for each reason."""

    class Both(Slotted, Shared):
        """A context class with slots and a shared list."""

    with pytest.raises(TypeError) as raised:
        SWPipeline(PLAN, TASKS, device="cpu", context=Both)
    assert [line[:21] for line in str(raised.value).splitlines()] == ["context class Both: '"] * 2
