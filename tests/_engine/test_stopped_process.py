"""A process that is stopped and continued (Ctrl-Z, a paused container) reports no stall for that.

    this test      waits until it is stopped, lets time pass, continues it
    script         task: one look of the watchdog, SIGSTOP to itself ... one more look, done

In the script each look of the watchdog counts one interval, and the stop as long as it lasts.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import swpipe._engine.watchdog
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.errors import StallError
from tests.support.sequencer import await_event

ROOT = Path(__file__).parents[2]

STALL_S = 0.1
STOPPED_S = 3 * STALL_S


class Clock:
    """The watchdog's ``time``: an interval per look, and the time in which the process stood."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self.waiting, self.looked_again = threading.Event(), threading.Event()

    def monotonic(self) -> float:
        """Called once at the start, and at the beginning of each look."""
        self.calls += 1
        if self.calls == 3:  # one look has seen the task
            self.waiting.set()
        if self.calls == 5:  # one look has come after the stop
            self.looked_again.set()
        if self.calls <= 5:  # afterwards it stands, until the task has returned
            self.now_s += STALL_S / 5
        return self.now_s

    def stop(self, ctx: IterContext) -> None:
        """The task."""
        await_event(self.waiting, "the watchdog's first look")
        begin_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.now_s += time.monotonic() - begin_s
        await_event(self.looked_again, "a look after the stop")


def main() -> None:
    """Be stopped twice: with the guard, and without it."""
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


def test_the_time_in_which_a_process_is_stopped_is_no_stall() -> None:
    """Where a look counts whatever time has passed, it is one."""
    script = subprocess.Popen(
        [sys.executable, "-m", "tests._engine.test_stopped_process"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with script:
        for _ in range(2):
            _, status = os.waitpid(script.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            time.sleep(STOPPED_S)  # for the clock; orders nothing
            script.send_signal(signal.SIGCONT)
        told, _ = script.communicate(timeout=60)
    assert told.splitlines() == ["1", "thread group 'default': inside task 'stop' of iteration 0"]


if __name__ == "__main__":
    main()
