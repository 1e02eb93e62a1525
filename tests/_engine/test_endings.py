"""Pipelines that end: dropped, closed anywhere, failed, or nested in one another."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, SWPipeline
from swpipe._engine.run import Run
from tests.support.plans_for_tests import piped, spread, tasks
from tests.support.sequencer import await_event, swpipe_threads

SERIAL = PipelinePlan.serial(tasks())
FAILS_AT = {"caller": "forward", "worker": "h2d"}


class Planted(Exception):
    """An error that a test raises on purpose."""


def make(plan: PipelinePlan | None = None, **fns: Callable[[IterContext], Any]) -> SWPipeline:
    """Return a pipeline on two thread groups whose tasks run the given functions."""
    return SWPipeline(plan or piped(), tasks(**fns), device="cpu")


def batches(pipe: SWPipeline, data: Any) -> list[int]:
    """Return the batches of all contexts."""
    return [ctx.batch for ctx in pipe.iterate(data)]


@contextmanager
def no_collector() -> Iterator[None]:
    """Switch off the garbage collector within the block: only reference counts free memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held() -> tuple[int, int]:
    """Return the numbers of threads and open descriptors of this process."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def memory_mib() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------------------------- dropped


def test_a_signal_that_raises_in_the_finalizer_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python loses that exception, and the finalizer stops half-way: the watchdog ends the run."""
    lost: list[Any] = []
    ends: list[int] = []
    end = Run.end

    def interrupted(run: Run) -> None:
        ends.append(1)
        if len(ends) == 1:
            raise KeyboardInterrupt
        end(run)

    monkeypatch.setattr(sys, "unraisablehook", lambda text: lost.append(text.exc_type))
    pipe = SWPipeline(spread(), tasks(), device="cpu", stall_timeout_s=0.5)
    pipe.fill_pipeline(iter([torch.ones(3) for _ in range(5)]))
    monkeypatch.setattr(Run, "end", interrupted)
    del pipe
    gc.collect()
    assert lost == [KeyboardInterrupt]
    deadline = time.monotonic() + 60.0
    while swpipe_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pipelines_dropped_in_mid_flight_give_all_back_and_warn_of_the_line() -> None:
    """Threads, descriptors and memory are freed without close(), with one ResourceWarning each."""
    count = 30
    make().run(range(3))
    before, before_mib = held(), memory_mib()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            pipe = SWPipeline(spread(), tasks(), device="cpu")
            line = sys._getframe().f_lineno - 1
            pipe.fill_pipeline(iter([torch.ones(1_000_000) for _ in range(5)]))
            del pipe
        gc.collect()
    told = [(w.category, w.filename, w.lineno) for w in caught]
    assert told == count * [(ResourceWarning, __file__, line)]
    assert "dropped without close()" in str(caught[0].message)
    assert swpipe_threads() == []
    assert held() == before
    assert memory_mib() < before_mib + 150  # a third of what the batches take


class Data:
    """An iterator that supports weak references."""

    def __init__(self) -> None:
        self.numbers = iter(range(5))
        self.end: type[BaseException] = StopIteration

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        for number in self.numbers:
            return number
        raise self.end


def interrupted(pipe: SWPipeline, data: Data) -> None:
    """Run on data that ends with KeyboardInterrupt."""
    data.end = KeyboardInterrupt
    with suppress(KeyboardInterrupt):
        pipe.run(data)


ENDS: dict[str, Callable[[SWPipeline, Data], object]] = {
    "closed": lambda pipe, _: pipe.close(),
    "drained": lambda pipe, _: pipe.drain(),
    "finished": lambda pipe, data: pipe.run(data),
    "interrupted": interrupted,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("plan", [piped(), spread(), SERIAL], ids=["two", "four", "serial"])
def test_what_has_ended_is_freed_without_the_collector(plan: PipelinePlan, end: str) -> None:
    """Drained data, and then the pipeline, are freed silently: no reference cycle holds them."""
    with no_collector():
        pipe, data = make(plan), Data()
        pipe.fill_pipeline(data)
        ENDS[end](pipe, data)
        assert swpipe_threads() == []
        refs = [weakref.ref(data), weakref.ref(pipe)]
        del data
        if end == "drained":
            assert refs[0]() is None
        del pipe
        assert [ref() for ref in refs] == [None, None]


# ------------------------------------------------------------------------------------- nested


@pytest.mark.parametrize("inner_name", ["h2d", "forward"])
@pytest.mark.parametrize("name", ["h2d", "forward", "iterator"])
def test_a_failure_of_an_inner_pipeline_comes_through_as_itself(name: str, inner_name: str) -> None:
    """It has the notes of both pipelines; both run again."""
    planted = Planted("inner")
    armed = [planted]

    def fail(ctx: IterContext) -> None:
        if ctx.batch == 2 and armed:
            raise armed.pop()

    with make(**{inner_name: fail}) as inner:

        def run(ctx: IterContext) -> None:
            if ctx.batch == 1:
                inner.run(range(4))

        fns = {} if name == "iterator" else {name: run}
        with make(**fns) as outer:
            data = (ctx.batch for ctx in inner.iterate(range(4))) if not fns else range(4)
            with pytest.raises(Planted) as caught:
                outer.run(data)
            assert caught.value is planted
            assert len(planted.__notes__) == 2
            assert outer.run(range(4)).iterations == 4
    assert swpipe_threads() == []


def test_successive_calls_may_come_from_different_threads() -> None:
    """The calls may come from a pool of threads, for example."""
    with make() as pipe, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        data = iter(range(8))
        out = [(one, two)[i % 2].submit(pipe.progress, data).result().batch for i in range(8)]
        assert out == list(range(8))
    assert swpipe_threads() == []


# ------------------------------------------------------------------------------------- close()


def test_close_warns_of_a_worker_that_does_not_return() -> None:
    """The warning names the thread group and the task; the thread ends when the task returns."""
    inside, release = threading.Event(), threading.Event()

    def hang(ctx: IterContext) -> None:
        if ctx.batch == 1:  # the newest one in flight
            inside.set()
            await_event(release, "the close")

    pipe = make(h2d=hang)
    pipe.fill_pipeline(iter(range(9)))
    await_event(inside, "h2d")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.close()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "thread group 'io' is still inside task 'h2d'" in str(caught[0].message)
    assert caught[0].filename == __file__
    release.set()
    assert swpipe_threads() == []


@pytest.mark.parametrize("name", ["h2d", "forward"])
@pytest.mark.parametrize("kind", [None, Planted, SystemExit])
def test_a_task_may_close_its_pipeline(kind: type[BaseException] | None, name: str) -> None:
    """The call raises, or has the task's own error; a worker's error comes too late."""

    def close(ctx: IterContext) -> None:
        if ctx.batch == 2:
            pipe.close()
            if kind is not None:
                raise kind("own")

    pipe = make(**{name: close})
    own = RuntimeError if kind is None else kind
    told = own if name == "forward" else (own, RuntimeError)
    with pytest.raises(told, match="own|closed during this call"):
        pipe.run(range(9))
    assert pipe.closed
    assert pipe.in_flight == 0
    assert swpipe_threads() == []


def test_two_threads_may_close_at_once_and_twice() -> None:
    """A third thread drives: all return, and the interrupted call says why it ends."""
    for _ in range(10):
        pipe, data = make(spread()), iter(range(10**6))
        pipe.fill_pipeline(data)
        barrier = threading.Barrier(3)

        def close(pipe: SWPipeline = pipe, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            pipe.close()
            pipe.close()

        closers = [threading.Thread(target=close) for _ in range(2)]
        for closer in closers:
            closer.start()
        barrier.wait()
        with pytest.raises(RuntimeError, match="closed"):
            pipe.run(data)
        for closer in closers:
            closer.join()
        assert pipe.in_flight == 0
        assert swpipe_threads() == []


# ------------------------------------------------------------------------------------- failures


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception whose attributes cannot be set."""

    what: str = "refuses notes"


class Hostile(Exception):
    """An exception whose ``__notes__`` raises."""

    @property
    def __notes__(self) -> list[str]:
        raise ArithmeticError("no notes")


@pytest.mark.parametrize("where", ["caller", "worker", "serial"])
@pytest.mark.parametrize("kind", [Frozen, Hostile])
def test_an_exception_that_refuses_notes_comes_out_as_itself(
    kind: type[Exception], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its note is printed to standard error; the run ends at once, and the pipeline runs again."""
    planted = kind()
    armed = [planted]

    def fail(ctx: IterContext) -> None:
        if ctx.batch == 3 and armed:
            raise armed.pop()

    with make(**{FAILS_AT.get(where, "forward"): fail}) as pipe:
        with pytest.raises(kind) as caught:
            (pipe.run_serial if where == "serial" else pipe.run)(range(9))
        assert caught.value is planted
        assert pipe.run(range(4)).iterations == 4
    assert f"{kind.__name__}: swpipe: at task" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["caller", "worker", "iterator", "serial"])
def test_a_failed_iterations_context_is_freed_once_the_failure_is_handled(where: str) -> None:
    """It needs no collector: "catch out of memory, retry with less" gets the memory back."""
    refs: list[weakref.ref[Any]] = []

    def keep(ctx: IterContext) -> None:
        ctx.tensor = torch.zeros(1000)
        refs.extend((weakref.ref(ctx), weakref.ref(ctx.tensor)))
        if where == "worker" and ctx.batch == 3:
            raise torch.cuda.OutOfMemoryError

    def fail(ctx: IterContext) -> None:
        if where in ("caller", "serial") and ctx.batch == 3:
            raise torch.cuda.OutOfMemoryError

    def data() -> Iterator[int]:
        yield from range(5)
        raise torch.cuda.OutOfMemoryError

    with make(h2d=keep, forward=fail) as pipe, no_collector():
        with suppress(torch.cuda.OutOfMemoryError):
            (pipe.run_serial if where == "serial" else pipe.run)(data())
        assert swpipe_threads() == []
        assert len(refs) >= 4
        assert [ref() for ref in refs] == [None] * len(refs)
        assert pipe.run(range(2)).iterations == 2


# ------------------------------------------------------------------------------------- rounds


def one_round(pipe: SWPipeline, number: int) -> None:
    """Fill the pipeline, and then fail, close, drain, or run to the end."""
    data = iter([torch.full((250_000,), i) for i in range(6)])
    pipe.fill_pipeline(data)
    if number % 4 == 0:
        with suppress(Planted):
            batch = torch.tensor([-1.0])
            pipe.drain()
            pipe.run([batch])
    elif number % 4 == 1:
        pipe.close()
    elif number % 4 == 2:
        pipe.drain()
    else:
        pipe.run(data)


def fail_at_minus_one(ctx: IterContext) -> None:
    """Raise for a negative batch."""
    if ctx.batch[0] < 0:
        raise Planted


def test_rounds_without_growth() -> None:
    """Threads, descriptors and memory do not grow, however each round ends."""
    rounds = 48
    make().run(range(3))
    before, before_mib = held(), 0.0
    pipe = make(spread(), h2d=fail_at_minus_one)
    for number in range(rounds):
        if pipe.closed:
            pipe = make(spread(), h2d=fail_at_minus_one)
        one_round(pipe, number)
        if number == rounds // 2:  # each new thread's arena counts once
            before_mib = memory_mib()
    pipe.close()
    assert swpipe_threads() == []
    assert held() == before
    assert memory_mib() < before_mib + 40
