"""An exception may arrive anywhere: afterwards a pipeline can be closed, and used again."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import swpipe._engine.run
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine.waiting import Host, HostThread
from tests.support.plans_for_tests import NAMES, piped, spread, tasks
from tests.support.sequencer import PATIENCE_S, swpipe_threads

SWPIPE = str(Path(swpipe.__file__).parent)


class Interrupter:
    """Raises KeyboardInterrupt in this thread at the n-th place, from 0.

    A place is an instruction of swpipe's, or of ``threading``, before which CPython looks for
    signals: the first of a function, and whatever follows a call or a jump backwards.

    Args:
        n: Where to raise.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen = 0
        self.where = ""
        self.places: list[tuple[CodeType, int]] = []

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        own = frame.f_code.co_filename.startswith(SWPIPE)
        if not own and frame.f_code.co_filename != threading.__file__:
            return None
        frame.f_trace_opcodes = True
        looks = signal_checks(frame.f_code)
        if not own:
            frame.f_trace_lines = False

        def at_instruction(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode" and frame.f_lasti in looks:
                self._place(frame)
            return at_instruction

        self._place(frame)
        return at_instruction

    def _place(self, frame: FrameType) -> None:
        self.seen += 1
        self.places.append((frame.f_code, frame.f_lasti))
        if self.seen == self.n + 1:
            sys.settrace(None)
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt

    @property
    def raised(self) -> bool:
        """Whether there were so many places."""
        return self.seen > self.n


_CHECKS: dict[Any, frozenset[int]] = {}


def signal_checks(code: Any) -> frozenset[int]:
    """The offsets of instructions before which CPython looks for signals."""
    if code not in _CHECKS:
        found, after = set(), False
        for ins in dis.get_instructions(code):
            if after:
                found.add(ins.offset)
            after = ins.opname.startswith(("CALL", "RESUME")) or "BACKWARD" in ins.opname
        _CHECKS[code] = frozenset(found)
    return _CHECKS[code]


def use_again(pipe: SWPipeline) -> list[int]:
    """Run on new data; where that is refused, do what the error says first."""
    for _ in range(3):
        try:
            return [ctx.batch for ctx in pipe.iterate(range(100, 104))]
        except RuntimeError as refusal:
            if "drain()" not in str(refusal):
                raise
            with suppress(KeyboardInterrupt):
                assert all(vars(ctx).keys() >= set(NAMES) for ctx in pipe.drain())
    raise AssertionError("still refused")


def fill(pipe: SWPipeline, data: Iterator[int]) -> None:
    """The prologue."""
    pipe.fill_pipeline(data)


def first(pipe: SWPipeline, data: Iterator[int]) -> None:
    """The prologue and one period."""
    pipe.progress(data)


def second(pipe: SWPipeline, data: Iterator[int]) -> None:
    """A period with iterations in flight, and the end of the data."""
    for _ in range(3):
        pipe.progress(data)


def drain(pipe: SWPipeline, data: Iterator[int]) -> None:
    """The epilogue."""
    pipe.drain()


def close(pipe: SWPipeline, data: Iterator[int]) -> None:
    """An end with iterations in flight."""
    pipe.close()


def leave(pipe: SWPipeline, data: Iterator[int]) -> None:
    """The same by the end of a with block."""
    pipe.__exit__(None, None, None)


CALLS: dict[str, tuple[bool, Callable[[SWPipeline, Iterator[int]], None]]] = {
    "fill_pipeline": (False, fill),
    "the first progress": (False, first),
    "progress to the end": (True, second),
    "drain": (True, drain),
    "close": (True, close),
    "__exit__": (True, leave),
}
"""Whether the pipeline is full before, and what is interrupted."""


class Ran:
    """Which task ran on which batch."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def tasks(self) -> list[PipelineTask]:
        """The five tasks."""
        return tasks(**{name: partial(self._note, name) for name in NAMES})

    def _note(self, name: str, ctx: IterContext) -> None:
        self.ran.append((name, ctx.batch))


def interrupted(plan: PipelinePlan, name: str, n: int) -> tuple[SWPipeline, Interrupter, Ran]:
    """A pipeline of which one call was interrupted at its n-th place."""
    full, act = CALLS[name]
    ran = Ran()
    pipe = SWPipeline(plan, ran.tasks(), device="cpu", check_effects=False)
    data = iter(range(4))
    if full:
        pipe.fill_pipeline(data)
    interrupter = Interrupter(n)
    with suppress(KeyboardInterrupt, StopIteration), interrupter:
        act(pipe, data)
    return pipe, interrupter, ran


def numbers_of_places(plan: PipelinePlan, name: str) -> list[int]:
    """Of each place of a call the first or, of every other one, the last time it is come to."""
    pipe, interrupter, _ = interrupted(plan, name, sys.maxsize)
    pipe.close()
    last = {place: n for n, place in enumerate(interrupter.places)}
    first = {place: n for n, place in reversed([*enumerate(interrupter.places)])}
    return [(last if k % 2 else first)[place] for k, place in enumerate(last)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("plan", "step"), [(piped(), 1), (spread(), 5)], ids=["two groups", "four groups"]
)
def test_an_interrupt_at_any_place_leaves_a_pipeline_that_closes_and_runs(
    plan: PipelinePlan, step: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left; a new fill works, or after the mend it names; no task runs twice.

    With more groups the places are the same ones more often: every fifth of them is tried.
    """
    # Threads that can end are waited for as long as a busy machine takes.
    monkeypatch.setattr(swpipe._engine.run, "JOIN_GRACE_S", PATIENCE_S)
    numbers = numbers_of_places(plan, name)[::step]
    for k, n in enumerate(numbers):
        pipe, interrupter, ran = interrupted(plan, name, n)
        where = f"place {n}, {interrupter.where}"
        if not pipe.closed and k // 2 % 2:
            assert use_again(pipe) == [100, 101, 102, 103], where
        pipe.close()
        assert swpipe_threads() == [], where
        assert len(set(ran.ran)) == len(ran.ran), where
        assert pipe.in_flight == 0, where
    assert len(numbers) * step > 150


@pytest.mark.slow
def test_an_interrupt_at_any_place_leaves_nothing_that_watches() -> None:
    """Neither on the caller's thread, where all later operators would go through it."""
    task = PipelineTask("a", lambda ctx: torch.zeros(2).add_(1))
    plan = PipelinePlan({task: TaskSchedule()}, pipeline_depth=2)
    n, raised, watched = 0, True, 0
    while raised:
        with SWPipeline(plan, device="cpu", check_effects=0.5) as pipe:
            interrupter = Interrupter(n)
            with suppress(KeyboardInterrupt), interrupter:
                pipe.progress(iter(range(2)))
        assert torch._C._len_torch_dispatch_stack() == 0, f"place {n}, {interrupter.where}"
        watched += interrupter.where.startswith(("checking", "purity", "operators"))
        n, raised = n + 1, interrupter.raised
    assert watched > 50


def test_a_worker_that_begins_after_the_end_ends_at_once() -> None:
    """An interrupt can come between a thread's start and the run's taking note of it."""

    class Late(Host):
        """Its threads begin when the test says so, and nobody knows of them."""

        def __init__(self) -> None:
            self.begin: list[Callable[[], None]] = []

        def start(self, name: str, target: Callable[[], None]) -> HostThread:
            self.begin.append(target)
            raise KeyboardInterrupt

    host = Late()
    with SWPipeline(piped(), tasks(), device="cpu", host=host) as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe.run(range(3))
    (begin,) = host.begin
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
