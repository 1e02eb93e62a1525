"""How far long work has come: on a terminal one line, written over and over; in a file, lines."""

from __future__ import annotations

import sys
from typing import Any

EVERY_S = 10.0
"""Between two lines in a file."""


def progress_bar(
    desc: str,
    unit: str,
    total: int | None = None,
    *,
    shown: bool = True,
    leave: bool = True,
    delay: float = 0.0,
) -> Any:
    """A bar of tqdm's on standard error; in a file its lines have neither bar nor carriage return.

    Args:
        desc: What is going on.
        unit: What is counted, behind a number: " steps".
        total: How many there will be; None where it is not known.
        shown: False for nothing at all.
        leave: Whether the last state stays.
        delay: Seconds that must pass before there is anything to see.
    """
    from tqdm import tqdm

    given: Any = {"desc": desc, "unit": unit, "total": total, "disable": not shown, "delay": delay}
    if sys.stderr.isatty() or "ipykernel" in sys.modules:  # both write a line over
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
            """There is nothing to clear."""

        def close(self) -> None:
            if leave and not self.disable and self.last_print_t >= self.start_t + delay:
                self.display()
            super().close()

        def _write(self, line: str) -> None:
            # All but what changes with the time alone.
            if (told := line.partition(" [")[0]) != getattr(self, "_told", None):
                self._told = told
                self.fp.write(f"{line}\n")
                self.fp.flush()

    # Without columns there is no bar.
    return Lines(**given, leave=False, ncols=0, mininterval=EVERY_S, miniters=1)
