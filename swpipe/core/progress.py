"""The progress of long work: on a terminal one line, rewritten each time; in a file, lines."""

from __future__ import annotations

import sys
from typing import Any

EVERY_S = 10.0
"""Seconds between two lines in a file."""


def progress_bar(
    desc: str,
    unit: str,
    total: int | None = None,
    *,
    shown: bool = True,
    leave: bool = True,
    delay: float = 0.0,
) -> Any:
    """Return a tqdm bar on standard error; in a file, its lines have no bar or carriage return.

    Args:
        desc: A description of the work.
        unit: The unit that is counted, behind a number: " steps".
        total: The expected number of units; None if it is not known.
        shown: Whether to show anything.
        leave: Whether the last state stays.
        delay: Seconds that must pass before anything is shown.
    """
    from tqdm import tqdm

    given: Any = {"desc": desc, "unit": unit, "total": total, "disable": not shown, "delay": delay}
    if sys.stderr.isatty() or "ipykernel" in sys.modules:  # both can rewrite a line
        return tqdm(**given, leave=leave)

    class Lines(tqdm):  # type: ignore[type-arg]
        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg is None:
                self._write(str(self) if self.n else self.desc.removesuffix(": "))

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            super().set_description(desc, refresh=False)
            if refresh and not self.disable:
                self._write(str(desc))

        def clear(self, nolock: bool | None = False) -> None:
            """Do nothing: lines in a file are not cleared."""

        def close(self) -> None:
            if leave and not self.disable and self.last_print_t >= self.start_t + delay:
                self.display()
            super().close()

        def _write(self, line: str) -> None:
            # The text without rate and times, which change even if nothing has been done.
            if (shown := line.partition(" [")[0]) != getattr(self, "_told", None):
                self._told = shown
                self.fp.write(f"{line}\n")
                self.fp.flush()

    # ncols=0 leaves the bar out.
    return Lines(**given, leave=False, ncols=0, mininterval=EVERY_S, miniters=1)
