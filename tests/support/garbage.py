"""What the collector of garbage need not search: all that is there for ever.

Each iteration that is recorded, and more of swpipe, collects. Among all that a process of tests has
imported, torch's compiler included, a search takes up to half a second.
"""

from __future__ import annotations

import gc

MANY = 50_000
"""So many objects are searched in a hundredth of a second."""


def freeze() -> None:
    """Keep the collector from searching what is there now."""
    gc.collect()
    gc.freeze()


def freeze_if_many() -> None:
    """The same where there is much, as after an import."""
    if len(gc.get_objects()) > MANY:
        freeze()
