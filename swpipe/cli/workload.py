"""What the planning commands work on: a job that swpipe knows, or tasks of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swpipe._distributed.rank_checks import gather
from swpipe.cli.inputs import Plans, job_class, make_config
from swpipe.cli.launched import RankedJob, on_all
from swpipe.cli.user_errors import UserError
from swpipe.core.plan import PipelinePlan, StreamRef
from swpipe.core.task import PipelineTask
from swpipe.device import resolve
from swpipe.plans import sharded_clicks
from swpipe.plans.clicks import PLANS

if TYPE_CHECKING:
    from swpipe.tasks.clicks.feed import AnyClickJob

CLICKS = "clicks"
"""The workload that `swpipe train` trains."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Tasks with batches to run them on.

    Attributes:
        name: As the user gave it.
        tasks: In serial order.
        batches: Gives the first so many batches, anew each time; fewer where there are no more.
        plans: Ready-made plans by name.
        streams: Task to the stream that its device work goes to; others use the caller's.
        device: Where the tasks work, in torch's words; None for the machine's accelerator, or else
            the CPU.
        ordered: Tasks that communicate, as far as that is known without looking.
        over_ranks: What each rank has, by rank: a collective where there are several.
    """

    name: str
    tasks: tuple[PipelineTask, ...]
    batches: Callable[[int], Iterator[Any]]
    plans: Plans
    streams: Mapping[str, StreamRef]
    device: str | None
    ordered: frozenset[str] = frozenset()
    over_ranks: Callable[[Any], list[Any]] = lambda value: [value]

    def take(self, count: int) -> list[Any]:
        """The first few batches; on several ranks all have to take as many.

        Raises:
            UserError: There are fewer.
        """
        taken = list(self.batches(count))
        if len(taken) < count:
            raise UserError(
                f"workload {self.name}: it gives {len(taken)} batches, where {count} are needed"
            )
        return taken


def open_workload(
    name: str,
    data: list[Path] | None,
    batch_size: int,
    device: str | None,
    seed: int,
    cache_dir: Path,
    job: RankedJob | None = None,
) -> Workload:
    """The workload of that name; only the click job has data, a batch size and a seed.

    Args:
        name: ``clicks``, or ``module:function``.
        data: Click logs; None for one that is made up.
        batch_size: Rows per step, on each rank.
        device: None for the CPU, or for the machine's accelerator where it is not the click job.
        seed: Of the model, and of a made-up log.
        cache_dir: Where a made-up log is kept.
        job: This process as one rank of several; all of them open it.

    Raises:
        UserError: There is none.
    """
    if name != CLICKS:
        return user_workload(name, device, job)
    make = partial(make_config, data, None, batch_size, device or "cpu", seed, False, cache_dir)
    config = make() if job is None else on_all(job, make)
    return click_workload(job_class(job is not None)(config), job)


def click_plans(job: RankedJob | None) -> Plans:
    """Ready-made plans of the click job: the one-process one, or that of several ranks."""
    return PLANS if job is None else sharded_clicks.PLANS


def usual_plan(job: RankedJob | None) -> str:
    """The click job's plan where the user names none."""
    return "pipelined" if job is None else "sparse_dist"


def click_workload(clicks: AnyClickJob[Any], job: RankedJob | None) -> Workload:
    """A click job, of one process or of all ranks; its usual plan tells streams and turns."""
    plans = click_plans(job)
    schedule = plans[usual_plan(job)]().schedule
    return Workload(
        CLICKS,
        tuple(clicks.tasks()),
        clicks.batches,
        plans,
        {task: entry.stream for task, entry in schedule.items() if entry.stream is not None},
        clicks.config.device,
        frozenset(task for task, entry in schedule.items() if entry.globally_ordered),
        clicks.over_ranks,
    )


def user_workload(name: str, device: str | None, job: RankedJob | None = None) -> Workload:
    """What ``module:function`` gives: its tasks, in serial order, and its batches.

    The function takes nothing. The current directory is searched for the module, too. On several
    ranks it is called once there is a process group.

    Raises:
        UserError: There is no such function, or it gives something else.
    """
    if job is not None:
        device = job.join(device or resolve(None).type)
    given = _call(name)
    if not isinstance(given, tuple) or len(given) != 2:
        raise UserError(f"workload {name}: it gave {given!r}; return (tasks, batches)")
    tasks, batches = given
    if not isinstance(tasks, Iterable) or not isinstance(batches, Iterable):
        raise UserError(f"workload {name}: return (tasks, batches), both of which can be listed")
    tasks = tuple(tasks)
    for task in tasks:
        if not isinstance(task, PipelineTask):
            raise UserError(f"workload {name}: {task!r} among its tasks is no PipelineTask")
    work = Workload(
        name,
        tasks,
        lambda count: islice(batches, count),
        {"serial": lambda: PipelinePlan.serial(tasks)},
        {},
        device,
    )
    return work if job is None else replace(work, over_ranks=gather)


def _call(name: str) -> Any:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UserError(f"workload {name}: name {CLICKS}, or module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"workload {name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"workload {name}: {module_name} has no function {function_name!r}")
    return function()
