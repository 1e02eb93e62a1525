"""What the planning commands work on: a job that swpipe knows, or tasks of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swpipe.cli.errors import UserError
from swpipe.cli.inputs import make_config
from swpipe.plan import PipelinePlan, StreamRef
from swpipe.plans.clicks import PLANS
from swpipe.task import PipelineTask

if TYPE_CHECKING:
    from swpipe.tasks.clicks import ClickConfig

CLICKS = "clicks"
"""The workload that `swpipe train` trains."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Tasks with batches to run them on.

    Attributes:
        name: As the user gave it.
        tasks: In serial order.
        batches: Gives an iterator over fresh batches.
        plans: Ready-made plans by name.
        streams: Task to the stream that its device work goes to; others use the caller's.
        device: Where the tasks work, in torch's words; None for the machine's accelerator, or else
            the CPU.
    """

    name: str
    tasks: tuple[PipelineTask, ...]
    batches: Callable[[], Iterator[Any]]
    plans: Mapping[str, Callable[[], PipelinePlan]]
    streams: Mapping[str, StreamRef]
    device: str | None

    def take(self, count: int) -> list[Any]:
        """The first few batches.

        Raises:
            UserError: There are fewer.
        """
        taken = list(islice(self.batches(), count))
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
) -> Workload:
    """The workload of that name; only the click job has data, a batch size and a seed.

    Raises:
        UserError: There is none.
    """
    if name != CLICKS:
        return user_workload(name, device)
    return click_workload(
        make_config(data, None, batch_size, device or "cpu", seed, False, cache_dir)
    )


def click_workload(config: ClickConfig) -> Workload:
    """The click job."""
    from swpipe.tasks.clicks import ClickJob

    job = ClickJob(config)
    schedule = PLANS["pipelined"]().schedule
    return Workload(
        CLICKS,
        tuple(job.tasks()),
        lambda: iter(job.batches()),
        PLANS,
        {task: entry.stream for task, entry in schedule.items() if entry.stream is not None},
        config.device,
    )


def user_workload(name: str, device: str | None) -> Workload:
    """What ``module:function`` gives: its tasks, in serial order, and its batches.

    The function takes nothing. The current directory is searched for the module, too.

    Raises:
        UserError: There is no such function, or it gives something else.
    """
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
    return Workload(
        name,
        tasks,
        lambda: iter(batches),
        {"serial": lambda: PipelinePlan.serial(tasks)},
        {},
        device,
    )


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
