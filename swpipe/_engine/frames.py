"""Whether a block of code is still being executed, by whatever thread.

A signal handler may raise between any two steps of a ``with`` statement, so a block that has ended
does not always say so. Its frame shows it. Searching all threads' stacks for the frame is no way:
CPython 3.11 crashes if ``sys._current_frames`` finds a frame that its own thread is just clearing.
"""

from __future__ import annotations

from types import FrameType


def is_executed(frame: FrameType) -> bool:
    """Whether some thread executes the frame of a function, which must not be a generator's.

    If not, its local variables are cleared.
    """
    try:
        frame.clear()
    except RuntimeError:  # documented: a frame that is executed cannot be cleared
        return True
    return False
