"""The progress of long work: one line on standard error, rewritten as the work proceeds."""

from __future__ import annotations

import sys
from typing import Any

EVERY_S = 10.0
"""The least time in seconds between two states that are written to a file."""


def progress_bar(desc: str, unit: str, total: int | None = None, *, shown: bool = True) -> Any:
    """Return a tqdm bar; in a file it has no bar, and a new state every ``EVERY_S`` seconds.

    Args:
        desc: A description of the work.
        unit: The unit that is counted, behind a number: " steps".
        total: The expected number of units; None if it is not known.
        shown: Whether to show anything.
    """
    from tqdm import tqdm

    # A terminal and a notebook rewrite the line; in a file every state stays.
    rewrites = sys.stderr.isatty() or "ipykernel" in sys.modules
    in_file: Any = {} if rewrites else {"ncols": 0, "mininterval": EVERY_S}
    return tqdm(desc=desc, unit=unit, total=total, disable=not shown, **in_file)
