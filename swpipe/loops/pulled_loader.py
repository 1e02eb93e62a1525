"""A loader, and all that is known of how its passes are pulled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swpipe.loops.draw_views import DrawViews, Turns
from swpipe.loops.loader_draws import LoaderDraws
from swpipe.loops.pass_generators import PassGenerators
from swpipe.loops.pull_watch import PullWatch


@dataclass(frozen=True, slots=True)
class PulledLoader:
    """A loader, and how its passes are pulled.

    Attributes:
        loader: The loader.
        generators: The random generators that matter.
        draws: What it draws in mid-pass.
        ahead: Whether batches are pulled while earlier ones are in use.
        makes_batches: Whether its code in this process makes the batches.
        turns: Of the pipeline, where a thread of its own pulls while the loop's body runs.
        watch: Watches pulls.
        views: Give what it draws from torch's default generator.
    """

    loader: Any
    generators: PassGenerators
    draws: LoaderDraws
    ahead: bool
    makes_batches: bool = False
    turns: Turns | None = None
    watch: PullWatch | None = None
    views: DrawViews | None = None


def length_of(loader: Any) -> float:
    """How many batches it says it has; infinity if it does not."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
