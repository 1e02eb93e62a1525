"""python -m tests._engine.signal_trials SEED COUNT HOW ...: real signals at random moments.

    close     a SIGALRM handler closes the pipeline and raises SystemExit
    closing   a SIGALRM handler closes the pipeline, which is being drained, and returns
    one       a single SIGINT while it is being drained
    storm     five SIGINTs, 50 us apart

Prints one line per trial that went wrong, and "COUNT trials" at the end of each kind. One of the
signals of a storm may be lost: Python ignores an exception that is raised in a weak reference's
callback, and says so on standard error.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from swpipe import SWPipeline
from tests.support.plans_for_tests import spread, tasks

GRACE_S = 10.0


class Trial:
    """A pipeline, and a signal that arrives while it runs."""

    def __init__(self, how: str, rng: random.Random) -> None:
        self.how = how
        self.after_s = rng.uniform(200e-6, 4e-3)
        self.signals = 5 if how == "storm" else 1
        self.raised = ""
        self.driving = False
        self.pipe = SWPipeline(spread(), tasks(), device="cpu")

    def close(self, signum: int, frame: FrameType | None) -> None:
        """Close the pipeline, as a handler of SIGALRM."""
        self.signals -= 1
        self.pipe.close()
        if self.how == "close":
            raise SystemExit(0)

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt as long as signals are left, like repeated Ctrl-C."""
        if self.signals > 0 and self.driving:
            self.signals -= 1
            raise KeyboardInterrupt

    def run(self) -> str:
        """Run the trial; return a description of what went wrong, or ""."""
        closing = self.how in ("close", "closing")
        signal.signal(signal.SIGALRM, self.close if closing else self.interrupt)
        again_s = {"storm": 50e-6, "one": 1e-3}.get(self.how, 0.0)
        timers = [(self.after_s, again_s)]
        while self.signals > 0 or (closing and not self.raised):
            try:  # several times, since a signal may come while the one before is handled
                try:
                    try:
                        if timers:  # here, since a busy machine may stop this thread until it rings
                            signal.setitimer(signal.ITIMER_REAL, *timers.pop())
                        self.under_fire()
                    except (KeyboardInterrupt, SystemExit) as error:
                        self.raised = type(error).__name__
                except (KeyboardInterrupt, SystemExit) as error:
                    self.raised = type(error).__name__
            except (KeyboardInterrupt, SystemExit) as error:
                self.raised = type(error).__name__
        signal.setitimer(signal.ITIMER_REAL, 0)
        wanted = {"close": "SystemExit", "closing": "RuntimeError: the pipeline"}
        if not self.raised.startswith(wanted.get(self.how, "KeyboardInterrupt")):
            return f"raised {self.raised!r}"
        return self.afterwards()

    def under_fire(self) -> None:
        """Drive the pipeline, and note the error that it raises."""
        try:
            self.driving = True
            self.drive()
        except (SystemExit, RuntimeError) as error:
            self.raised = f"{type(error).__name__}: {error}"
            if "drain()" in self.raised:
                self.pipe.drain()
        finally:
            self.driving = False

    def drive(self) -> None:
        """Run the pipeline until the signal arrives."""
        while self.signals > 0 or self.how == "closing":
            data = iter(range(50))
            if self.how in ("closing", "one"):
                self.pipe.fill_pipeline(data)
                self.pipe.drain()
            else:
                for _ in self.pipe.iterate(data):
                    pass

    def afterwards(self) -> str:
        """Return a description of the fault if the pipeline does not run again or close, or ""."""
        if not self.pipe.closed:
            try:
                self.pipe.drain()
                out = [ctx.batch for ctx in self.pipe.iterate(range(5))]
            except RuntimeError as error:
                return f"bricked: {error}"
            if out != [0, 1, 2, 3, 4]:
                return f"handed out {out}"
        self.pipe.close()
        deadline = time.monotonic() + GRACE_S
        while left := [t.name for t in threading.enumerate() if t.name.startswith("swpipe-")]:
            if time.monotonic() > deadline:
                return f"left {left}"
            time.sleep(0.001)
        return ""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End the process with all stacks if the block takes longer."""
    import faulthandler

    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Run all trials."""
    seed, count = map(int, sys.argv[1:3])
    rng = random.Random(seed)
    for how in sys.argv[3:]:
        for number in range(count):
            with deadline(60):
                if wrong := Trial(how, rng).run():
                    print(f"trial {number} of {how}: {wrong}")
        print(f"{count} trials")


if __name__ == "__main__":
    main()
