"""Exclusion of permanent objects from garbage collection.

Each recorded iteration, and more of swpipe, collects garbage. A search through all that a process
of tests has imported, torch's compiler included, takes up to half a second.
"""

from __future__ import annotations

import gc

MANY = 50_000
"""The number of objects that are searched in a hundredth of a second."""


def freeze() -> None:
    """Exclude all present objects from garbage collection."""
    gc.collect()
    gc.freeze()


def freeze_if_many() -> None:
    """Exclude the present objects if there are many, as after an import."""
    if len(gc.get_objects()) > MANY:
        freeze()
