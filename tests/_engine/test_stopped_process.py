"""A process that is stopped and continued (Ctrl-Z, a paused container) reports no stall for that.

    script         waits until its child is stopped, lets time pass, continues it
    child          task: one look of the watchdog, SIGSTOP to itself ... one more look, done

In the child each look of the watchdog counts one interval, and the stop as long as it lasts.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time

import swpipe._engine.watchdog
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.errors import StallError
from tests.support.scripts import Script, Scripts
from tests.support.sequencer import await_event

STALL_S = 0.1
STOPPED_S = 3 * STALL_S


class Clock:
    """A stand-in for the watchdog's ``time``: an interval per look, plus the time of the stop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self.waiting, self.looked_again = threading.Event(), threading.Event()

    def monotonic(self) -> float:
        """Return the time; called once at the start and at the beginning of each look."""
        self.calls += 1
        if self.calls == 3:  # one look has seen the task
            self.waiting.set()
        if self.calls == 5:  # one look has come after the stop
            self.looked_again.set()
        if self.calls <= 5:  # afterwards it stands, until the task has returned
            self.now_s += STALL_S / 5
        return self.now_s

    def stop(self, ctx: IterContext) -> None:
        """Stop this process by SIGSTOP, between two looks of the watchdog."""
        await_event(self.waiting, "the watchdog's first look")
        begin_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.now_s += time.monotonic() - begin_s
        for _ in range(600):  # in slices: an interrupt right before a wait is seen after it
            if self.looked_again.wait(0.1):
                return
        raise TimeoutError("no look came after the stop")


def be_stopped() -> None:
    """Run a task that stops the process, with the guard and without it."""
    for counts_at_most in (swpipe._engine.watchdog.LOOK_COUNTS_AT_MOST, math.inf):
        clock = Clock()
        swpipe._engine.watchdog.time = clock  # type: ignore[attr-defined]
        swpipe._engine.watchdog.LOOK_COUNTS_AT_MOST = counts_at_most
        task = PipelineTask("stop", clock.stop)
        with SWPipeline(PipelinePlan.serial([task]), [task], stall_timeout_s=STALL_S) as pipe:
            try:
                print(pipe.run(range(1)).iterations)
            except StallError as error:
                print(str(error).splitlines()[1].strip())


def main() -> None:
    """Fork the child, and continue it each time it is stopped."""
    child = os.fork()
    if child == 0:
        be_stopped()
        return
    for _ in range(2):
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(STOPPED_S)  # for the clock; orders nothing
        os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0


def test_the_time_in_which_a_process_is_stopped_is_no_stall(scripts: Scripts) -> None:
    """It would be a stall if a look counted all the time since the previous one."""
    done = scripts.run(Script(module="tests._engine.test_stopped_process"))
    told = "thread group 'default': inside task 'stop' of iteration 0"
    assert done[:2] == (0, f"1\n{told}\n"), done.stderr


if __name__ == "__main__":
    main()
