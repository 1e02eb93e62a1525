"""The choice whether a pipeline's tasks are watched while it runs, and in which iterations."""

from __future__ import annotations

from dataclasses import replace

from swpipe._engine.iterations import Engine, TaskCheck
from swpipe.analysis.verification import VerifiedPlan
from swpipe.inference.watched_iterations import WatchedIterations

_PURE_SHARE = 0.02
"""The share of the later iterations in which pure tasks are watched by default."""


def checked(engine: Engine, verified: VerifiedPlan, share: float | None) -> Engine:
    """Return the engine with a check of what tasks do, or the engine itself if nothing is watched.

    Args:
        engine: The engine.
        verified: The plan and its tasks.
        share: The share of the iterations that are watched. None: pure tasks in the first
            iterations and a share of the later ones; all tasks in the first ones, unless the plan
            is proved by what they declare. A recording is no proof: it has what tasks did in a few
            iterations.

    Raises:
        ValueError: ``share`` is not a number above 0 and up to 1.
    """
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise ValueError(
            f"check_effects is {share!r}: give True, False, or the share of the iterations that "
            "are watched, above 0 and up to 1"
        )
    tasks = verified.tasks
    depth = verified.program.depth
    every = pure = WatchedIterations(depth, share)
    if share is None:
        declarations = [io for task in tasks for io in task.io]
        apart = {io.state for io in declarations if io.others != "rw"}
        # Only their memory shows whether undeclared tasks really leave these states alone, so
        # declarations alone do not prove the plan.
        watches_memory = any(io.memory is not None and io.state in apart for io in declarations)
        in_doubt = watches_memory and any(task.undeclared for task in tasks)
        known = not in_doubt and verified.proved_by_declarations()
        every = WatchedIterations(depth, None if known else 0)
        pure = WatchedIterations(depth, _PURE_SHARE if any(task.pure for task in tasks) else None)
    if not (every.until or pure.until):
        return engine
    # Imported late: these are many modules, and a run that watches nothing needs none of them.
    from swpipe.inference.checking import RunCheck
    from swpipe.inference.places import KeptOrders

    orders = KeptOrders(verified)

    def begin(first: int) -> TaskCheck | None:
        is_watched = first < max(every.until, pure.until)
        return RunCheck(orders, engine.device, every, pure, first) if is_watched else None

    return replace(engine, check=begin)
