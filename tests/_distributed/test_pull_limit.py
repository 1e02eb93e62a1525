"""The limit on a pull over several ranks' data, and the end of a thread that exceeds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import swpipe
import swpipe._distributed.pull_limit
import swpipe._engine.interruption
from swpipe._distributed.even_data import OutOfStepError
from swpipe._distributed.pull_limit import PullLimit
from swpipe._engine.interruption import STALL_EXIT_CODE, end_thread
from swpipe.errors import StallError
from swpipe.loops import EvenData
from tests.support.ranks import Ranks
from tests.support.sequencer import PATIENCE_S, await_event, swpipe_threads

LIMIT_S = 0.05
LOOKS = 5
"""The number of looks of the watching thread that make up the limit."""


class Pass:
    """A stand-in for the watched pass."""


class Body:
    """A thread inside a loop's body, which waits in Python code."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def _run(self) -> None:
        try:
            while not self._end.wait(0.001):
                self._end.wait(0.001)  # at another place, so that it is seen to move
        except BaseException as error:  # noqa: BLE001 - what the test looks at
            self.error = error

    def end(self) -> BaseException | None:
        """Let the thread return, and return the error that it raised."""
        self._end.set()
        return self.result()

    def result(self) -> BaseException | None:
        """Wait for the thread to end, and return the error that it raised."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.error


class Looks:
    """A stand-in for ``time`` in the watching thread: each look takes one interval."""

    def __init__(self, act: Callable[[int], float]) -> None:
        self.count = 0
        self._act = act
        self._now_s = 0.0

    def monotonic(self) -> float:
        """Return the time; called once at the start and at each look."""
        self._now_s += LIMIT_S / LOOKS + self._act(self.count)
        self.count += 1
        return self._now_s


def too_late(_: Any) -> OutOfStepError:
    """Return the error of a pull that takes too long."""
    return OutOfStepError("the loader of rank 1 hangs")


def test_a_pull_that_takes_too_long_is_an_error_in_the_body(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error is also printed, for a body that is stuck in a collective."""
    body, watched = Body(), Pass()
    limit = PullLimit(watched, body.ident, LIMIT_S, too_late)
    limit.began = 1
    error = body.result()
    limit.end()
    assert isinstance(error, OutOfStepError)
    assert str(error) == "the loader of rank 1 hangs"
    assert capfd.readouterr().err == "swpipe: OutOfStepError: the loader of rank 1 hangs\n"


def looks_until_late(act: Callable[[PullLimit, int], float], monkeypatch: Any) -> int:
    """Return the look at which a pull is late; ``act`` returns seconds to add before each look."""
    body, watched, late = Body(), Pass(), threading.Event()
    limits: list[PullLimit] = []
    ready = threading.Event()
    found: list[int] = []

    def before(number: int) -> float:
        await_event(ready, "the limit")
        return act(limits[0], number)

    def describe(_: Any) -> OutOfStepError:
        found.append(looks.count)
        late.set()
        return OutOfStepError("late")

    looks = Looks(before)
    monkeypatch.setattr(swpipe._distributed.pull_limit, "time", looks)
    limits.append(PullLimit(watched, body.ident, LIMIT_S, describe))
    ready.set()
    await_event(late, "the limit's end")
    body.result()
    limits[0].end()
    return found[0]


def test_each_pull_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pulls together may take longer."""

    def pull(limit: PullLimit, number: int) -> float:
        limit.began = min(number, 20)
        return 0.0

    assert 20 + LOOKS <= looks_until_late(pull, monkeypatch) <= 20 + LOOKS + 3


def test_the_time_in_which_the_process_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look after a long stop counts two intervals."""

    def stop(limit: PullLimit, number: int) -> float:
        limit.began = 1
        return 1000.0 if number == 2 else 0.0

    assert LOOKS <= looks_until_late(stop, monkeypatch) <= LOOKS + 2  # a sum of floats


def test_a_body_that_goes_on_gets_the_error_with_its_next_batch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error of the pulling thread is only printed; the body's own error is raised."""
    body, watched = Body(), Pass()
    limit = PullLimit(watched, body.ident, 600.0, too_late)
    own = PullLimit(watched, threading.get_ident(), 600.0, too_late)
    own.raised(OutOfStepError("raised in the body"))
    assert own.late is None
    own.end()
    limit.raised(OutOfStepError("rank 1 does not answer"))
    while limit.late is not None and "swpipe-pull-limit" in swpipe_threads(0.1):
        pass
    assert body.end() is None
    assert capfd.readouterr().err == "swpipe: OutOfStepError: rank 1 does not answer\n"


def test_the_thread_ends_with_its_pass() -> None:
    """It ends by ``end``, or when nothing refers to the pass."""
    watched = Pass()
    limit = PullLimit(watched, threading.get_ident(), 600.0, too_late)
    limit.end()
    assert swpipe_threads() == []
    limit = PullLimit(Pass(), threading.get_ident(), 600.0, too_late)
    assert swpipe_threads() == []
    assert limit.late is None


@pytest.mark.parametrize(
    ("alone", "left", "right"),
    [
        (True, [], []),
        (False, [True], []),
        (False, [False, True], ["abort"]),
        (False, [False, False], ["abort", STALL_EXIT_CODE]),
    ],
)
def test_a_process_ends_only_where_nothing_else_ends_the_call(
    alone: bool,
    left: list[bool],
    right: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First the thread is interrupted, then process groups are aborted, then the process exits."""
    done: list[Any] = []
    answers = iter(left)
    interruption = swpipe._engine.interruption
    monkeypatch.setattr(interruption, "is_alone", lambda: alone)
    monkeypatch.setattr(interruption, "abort_process_groups", lambda _: done.append("abort"))
    monkeypatch.setattr(os, "_exit", done.append)
    body = Body()
    end_thread(body.ident, RuntimeError("late"), lambda: next(answers))
    assert isinstance(body.result(), StallError)
    assert done == right
    assert [*answers] == []


def _loader_hangs(timeout_s: float) -> str:
    """Return the error of a loop whose loader hangs on rank 1."""
    goes_on = threading.Event()

    class Rows:
        def __iter__(self) -> Iterator[int]:
            yield 0
            yield 1
            if dist.get_rank() == 1:
                goes_on.wait(PATIENCE_S)
            yield 2

    try:
        with EvenData("stop", timeout_s=timeout_s) as even:
            for _ in swpipe.ahead(even.loader(Rows())):
                pass
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        goes_on.set()
    return ""


def test_a_loader_that_hangs_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    """The thread that pulls waits; the callers of both ranks wait no longer than the limit."""
    other, own = two_ranks.run(_loader_hangs, 3.0)
    assert "OutOfStepError: the loader of rank 1 (generator) has not returned" in own
    assert "rank 1 did not answer within 3 s" in other
