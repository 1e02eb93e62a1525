"""Whether a pipeline's tasks are watched while it runs, and in which iterations."""

from __future__ import annotations

from dataclasses import replace

from swpipe._engine.iterations import Engine, TaskCheck
from swpipe.analysis.verification import VerifiedPlan
from swpipe.inference.watched_iterations import WatchedIterations

_PURE_SHARE = 0.02
"""Of the later iterations, how many pure tasks are watched in if nothing else is asked for."""


def checked(engine: Engine, verified: VerifiedPlan, share: float | None) -> Engine:
    """The engine, with a check of what tasks do.

    Args:
        engine: The engine.
        verified: The plan and its tasks.
        share: Of the iterations, how many are watched. None: pure tasks in the first iterations and
            a share of the later ones; all tasks in the first ones, unless what they declare proves
            the plan. A recording does not: it has what tasks did in a few iterations.

    Raises:
        ValueError: ``share`` is no such number.
    """
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise ValueError(
            f"check_effects is {share!r}: give True, False, or the share of the iterations that "
            "are watched, above 0 and up to 1"
        )
    tasks, depth = verified.tasks, verified.program.depth
    every = pure = WatchedIterations(depth, share)
    if share is None:
        said = [io for task in tasks for io in task.io]
        apart = {io.state for io in said if io.others != "rw"}
        # By their memory it is seen whether tasks that say nothing leave these states alone.
        seen = any(io.memory is not None and io.state in apart for io in said)
        in_doubt = seen and any(task.undeclared for task in tasks)
        known = not in_doubt and verified.proved_by_declarations()
        every = WatchedIterations(depth, None if known else 0)
        pure = WatchedIterations(depth, _PURE_SHARE if any(task.pure for task in tasks) else None)
    if not (every.until or pure.until):
        return engine
    # Late: they are many modules, and a run that watches nothing needs none of them.
    from swpipe.inference.checking import RunCheck
    from swpipe.inference.places import KeptOrders

    orders = KeptOrders(verified)

    def begin(first: int) -> TaskCheck | None:
        is_watched = first < max(every.until, pure.until)
        return RunCheck(orders, engine.device, every, pure, first) if is_watched else None

    return replace(engine, check=begin)
