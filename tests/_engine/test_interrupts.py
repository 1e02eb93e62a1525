"""An exception may arrive anywhere: afterwards a pipeline can be closed, and used again."""

from __future__ import annotations

import dis
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch

import swpipe._engine.run
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine.waiting import Host, HostThread
from tests.support.cpu_on import CpuOn
from tests.support.plans_for_tests import NAMES, piped, spread, tasks
from tests.support.sequencer import PATIENCE_S, swpipe_threads

SWPIPE = str(Path(swpipe.__file__).parent)


class Place(NamedTuple):
    """An instruction of swpipe or ``threading`` before which CPython handles signals.

    It is the first of a function, or it follows a call or a backward jump.
    """

    code: CodeType
    offset: int
    times: int
    """How often the instruction was reached before."""


class Interrupter:
    """A tracer that raises KeyboardInterrupt at a place, or without one notes all places.

    Only the code of the place is traced, so that all other code runs at full speed.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.place = place
        self.where = ""
        self.seen: Counter[tuple[CodeType, int]] = Counter()

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SWPIPE) and code.co_filename != threading.__file__:
            return None
        if self.place is not None and code != self.place.code:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looks = signal_checks(code)

        def at_instruction(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode" and frame.f_lasti in looks:
                self._come_to(frame)
            return at_instruction

        self._come_to(frame)
        return at_instruction

    def _come_to(self, frame: FrameType) -> None:
        here = frame.f_code, frame.f_lasti
        if self.place == (*here, self.seen[here]):
            sys.settrace(None)
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        self.seen[here] += 1

    def places(self) -> list[Place]:
        """Return all places, alternately at their first and their last occurrence."""
        return [
            Place(*here, times - 1 if k % 2 else 0)
            for k, (here, times) in enumerate(self.seen.items())
        ]


_CHECKS: dict[Any, frozenset[int]] = {}


def signal_checks(code: Any) -> frozenset[int]:
    """Return the offsets of the instructions before which CPython handles signals."""
    if code not in _CHECKS:
        found, after = set(), False
        for ins in dis.get_instructions(code):
            if after:
                found.add(ins.offset)
            after = ins.opname.startswith(("CALL", "RESUME")) or "BACKWARD" in ins.opname
        _CHECKS[code] = frozenset(found)
    return _CHECKS[code]


def use_again(pipe: SWPipeline) -> list[int]:
    """Run on new data; if that is refused, first call ``drain`` as the error says."""
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
    """Run the prologue and one period."""
    pipe.fill_pipeline(data)
    pipe.progress(data)


CALLS: dict[str, tuple[bool, Callable[[SWPipeline, Iterator[int]], object]]] = {
    "fill_pipeline, progress": (False, fill),
    "progress to the end": (True, lambda pipe, data: [pipe.progress(data) for _ in range(3)]),
    "drain": (True, lambda pipe, _: pipe.drain()),
    "__exit__": (True, lambda pipe, _: pipe.__exit__(None, None, None)),
}
"""Pairs: whether the pipeline is full before, and the call that is interrupted."""


def interrupted(
    plan: PipelinePlan, name: str, place: Place | None = None
) -> tuple[SWPipeline, Interrupter, list[tuple[str, int]]]:
    """Return a pipeline with an interrupted call, the tracer, and the runs of tasks."""
    full, act = CALLS[name]
    ran: list[tuple[str, int]] = []

    def note(name: str, ctx: IterContext) -> None:
        ran.append((name, ctx.batch))

    noting = tasks(**{name: partial(note, name) for name in NAMES})
    pipe = SWPipeline(plan, noting, device="cpu", check_effects=False)
    data = iter(range(4))
    if full:
        pipe.fill_pipeline(data)
    interrupter = Interrupter(place)
    with suppress(KeyboardInterrupt, StopIteration), interrupter:
        act(pipe, data)
    return pipe, interrupter, ran


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("plan", "step"), [(piped(), 1), (spread(), 5)], ids=["two groups", "four groups"]
)
def test_an_interrupt_at_any_place_leaves_a_pipeline_that_closes_and_runs(
    plan: PipelinePlan, step: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread remains; a new fill works, or works as its error says; no task runs twice.

    With more groups the places are mostly the same: every fifth of them is tried.
    """
    # Threads that can end are waited for as long as a busy machine takes.
    monkeypatch.setattr(swpipe._engine.run, "JOIN_GRACE_S", PATIENCE_S)
    pipe, all_places, _ = interrupted(plan, name)
    pipe.close()
    places = all_places.places()
    assert len(places) > 150
    for k, place in enumerate(places[::step]):
        pipe, interrupter, ran = interrupted(plan, name, place)
        where = f"place {k}, {interrupter.where}"
        if not pipe.closed and k // 2 % 2:
            assert use_again(pipe) == [100, 101, 102, 103], where
        pipe.close()
        assert swpipe_threads() == [], where
        assert len(set(ran)) == len(ran), where
        assert pipe.in_flight == 0, where


@pytest.mark.slow
def test_an_interrupt_at_any_place_leaves_nothing_that_watches() -> None:
    """Nothing remains on the caller's thread, where it would see all later operators."""
    task = PipelineTask("a", lambda ctx: torch.zeros(2).add_(1))
    plan = PipelinePlan({task: TaskSchedule()}, pipeline_depth=2)
    watched = 0

    def interrupted_at(place: Place | None = None) -> Interrupter:
        with SWPipeline(plan, device="cpu", check_effects=0.5) as pipe:
            interrupter = Interrupter(place)
            with suppress(KeyboardInterrupt), interrupter:
                pipe.progress(iter(range(2)))
        return interrupter

    for place in interrupted_at().places():
        where = interrupted_at(place).where
        assert torch._C._len_torch_dispatch_stack() == 0, where
        watched += where.startswith(("checking", "purity", "operators"))
    assert watched > 50


def test_a_worker_that_begins_after_the_end_ends_at_once() -> None:
    """An interrupt can come between a thread's start and the run's taking note of it."""

    class Late(Host):
        """A host whose threads start when the test calls ``begin``, and are never registered."""

        def __init__(self) -> None:
            self.begin: list[Callable[[], None]] = []

        def start(self, name: str, target: Callable[[], None]) -> HostThread:
            self.begin.append(target)
            raise KeyboardInterrupt

    host = Late()
    with SWPipeline(piped(), tasks(), device=CpuOn(host)) as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe.run(range(3))
    (begin,) = host.begin
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
