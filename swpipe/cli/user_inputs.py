"""The things that the user names on the command line: workloads, plans and files.

A ``UserError`` says which of them does not exist, is of another kind, or cannot be written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from functools import cached_property
from importlib.util import find_spec
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer

from swpipe.cli.launched import Rank, agree
from swpipe.cli.options import DEFAULT
from swpipe.cli.user_errors import UserError, about_plan, echo, reason
from swpipe.core.context import context_class
from swpipe.core.files import check_writable
from swpipe.core.loaders import is_apart
from swpipe.core.messages import plain, shown
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import on_cpu, resolve
from swpipe.errors import add_note
from swpipe.pipeline import SWPipeline
from swpipe.planning.limits import Limits
from swpipe.plans.prefetch import prefetch_plan
from swpipe.profiler.sampling import Sample
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, Tuned, tune

T = TypeVar("T")

_IMAGES = "swpipe.tasks.images:loop"
"""The function of the image model, whose name is ``DEFAULT``."""

SERIAL = "serial"
PIPELINED = "pipelined"
AUTO = "auto"
"""The names of plans that are made for the tasks of a workload, the last one by trial."""

PICTURES = (".png", ".svg", ".pdf")

MOST_MEASURED = 48
"""The number of batches measured from a source that cannot be sampled. Events in every tenth or
sixteenth batch are among them, and a loader soon has made them.
"""

TUNING_S = 60.0
"""The default limit in seconds for choosing a plan."""


class Opened:
    """A workload for one command, under named plans; its job is opened when it is first needed.

    On several ranks, each rank creates one, and all must have been given the same command.

    Args:
        context: The command's context.
        workload: The workload's name as the user gave it.
        device: The device in torch's words; None for the workload's own.
        plans: Names of plans; "" is the workload's usual plan.

    Attributes:
        plans: The names of the plans, the usual plan by its own name.
        tuned: The result of making the plan ``AUTO``, once it was made.
    """

    def __init__(
        self,
        context: typer.Context,
        workload: str,
        device: str | None,
        plans: Sequence[str] = (),
    ) -> None:
        usual = PIPELINED if workload == DEFAULT else SERIAL
        self.plans = [name or usual for name in plans]
        self.tuned: Tuned | None = None
        self._workload = workload
        self._rank: Rank | None = context.obj
        # A plan in a file is loaded now, so that a mistake is reported before any work.
        made = (SERIAL, PIPELINED, AUTO)
        self._loaded = {name: load_plan(name) for name in self.plans if name not in made}
        # Plans are compared as well as options: a file may differ between nodes.
        agree(context, list(map(self._loaded.get, self.plans)))
        self._named_device = checked_device(workload, device)

    @cached_property
    def job(self) -> Job:
        """The job of the workload, which is opened on first access."""
        return self.open_job()

    def open_job(self) -> Job:
        """Return a new job of the workload."""
        return Job(self._workload, self._device)

    @cached_property
    def _device(self) -> str | None:
        # Several ranks form their process group here, before a job is opened, which may use it.
        return self._named_device if self._rank is None else self._rank.join(self._named_device)

    def plan(self, name: str | None = None) -> PipelinePlan:
        """Return the plan of that name, by default the first."""
        name = self.plans[0] if name is None else name
        if name not in self._loaded:
            self._loaded[name] = self._make(name)
        return self._loaded[name]

    def _make(self, name: str) -> PipelinePlan:
        if name == SERIAL:
            return PipelinePlan.serial(self.job.tasks)
        if name == PIPELINED:
            return self.job.prefetching_plan()
        self.tuned = self.job.tune()
        echo(f"auto: {self.tuned.format()}")
        return self.tuned.plan


def checked_device(workload: str, device: str | None) -> str | None:
    """Return the given device for a workload, or by default the workload's own.

    Raises:
        UserError: The device does not work, or the workload cannot use it.
    """
    if device is not None:
        # A tensor is created to find out whether the device works, not only whether its name is
        # valid.
        try:
            resolve(device)
            torch.empty(0, device=device)
        except (RuntimeError, ValueError, AssertionError) as error:  # torch without CUDA asserts
            raise UserError(f"--device {plain(device)}: {str(error).splitlines()[0]}") from error
    if workload != DEFAULT:
        return device
    if not on_cpu(torch.device(device or "cpu")):
        raise UserError(
            f"--device {device}: the image model trains on the CPU; leave the option out, or give "
            "--workload module:function for a loop of yours"
        )
    return "cpu"


# ----------------------------------------------------------------------------- the user's loop


class Job:
    """The loop that a workload's function has returned: tasks in serial order, and batches.

    The module is also searched for in the current directory.

    Args:
        workload: The image model's name, or ``module:function``.
        device: The device of the loop's pipelines; see ``SWPipeline``.

    Attributes:
        workload: The name.
        tasks: The tasks in serial order.
        batches: The source of the batches.
    """

    def __init__(self, workload: str, device: str | None) -> None:
        # The checks name what the function returned, because the user sees no traceback.
        given = _call(_IMAGES if workload == DEFAULT else workload)
        tuple_of_some = isinstance(given, tuple) and len(given) in (2, 3)
        if not (tuple_of_some and all(isinstance(part, Iterable) for part in given[:2])):
            raise UserError(
                f"workload {workload}: the function returned {shown(given)}; return (tasks, "
                "batches), both of which can be iterated over, or (tasks, batches, context)"
            )
        tasks, batches, *context = given
        self.workload = workload
        self.tasks: tuple[PipelineTask, ...] = tuple(tasks)
        self.batches: Iterable[Any] = batches
        self._device = device
        for task in self.tasks:
            if not isinstance(task, PipelineTask):
                raise UserError(
                    f"workload {workload}: {shown(task)} among its tasks is no PipelineTask; "
                    "@swpipe.task makes one of a function"
                )
        try:
            self._context = context_class(context[0] if context else None)
        except TypeError as error:
            raise UserError(f"workload {workload}: {'; '.join(str(error).splitlines())}") from error

    @property
    def epoch_steps(self) -> int:
        """The number of batches."""
        if not isinstance(self.batches, Sized):
            raise UserError(
                f"--steps is missing: the batches of {self.workload} have no length; give the "
                "number of steps, such as --steps 200"
            )
        return len(self.batches)

    @property
    def loader(self) -> Iterable[Any] | None:
        """The source of the batches, if it can be restarted and its calls take time; else None."""
        # A list costs nothing to call, and an iterator cannot be restarted.
        return None if isinstance(self.batches, Sequence | Iterator) else self.batches

    @property
    def _is_apart(self) -> bool:
        # An iterator is assumed to be apart.
        return isinstance(self.batches, Iterator) or is_apart(self.batches)

    def pipeline(self, plan: PipelinePlan) -> SWPipeline[Any]:
        """Return a pipeline of the tasks under a plan."""
        return SWPipeline(plan, self.tasks, device=self._device, context=self._context)

    def prefetching_plan(self) -> PipelinePlan:
        """Return the plan in which the leading pure tasks run ahead of the other tasks."""
        leading = takewhile(lambda task: task.pure and not task.random, self.tasks)
        ahead = [task.name for task in leading]
        behind = [task.name for task in self.tasks[len(ahead) :]]
        if not ahead or not behind:
            raise UserError(
                f"plan {PIPELINED}: the leading tasks that are pure run ahead of the others, and "
                f"{len(ahead)} of {len(self.tasks)} tasks of {self.workload} are: declare those "
                "pure that prepare a batch, or use another plan"
            )
        return prefetch_plan(
            ahead,
            behind,
            carried=[(behind[0], behind[-1])],
            pull_group="loader" if self._is_apart else None,
        )

    def take(self, count: int) -> list[Any]:
        """Return the first ``count`` batches; all ranks take the same number."""
        batches = [*islice(self.batches, count)]
        if len(batches) < count:
            raise UserError(
                f"workload {self.workload}: it has {len(batches)} batches, and {count} are needed; "
                "return more, or ask for fewer"
            )
        return batches

    def sample(self) -> Sample:
        """Return the sample of the batches that is measured."""
        try:
            if isinstance(self.batches, Sequence):
                return Sample.of(self.batches)
            return Sample.of(iter(self.batches), MOST_MEASURED)
        except ValueError as error:
            raise UserError(f"workload {self.workload}: {error}") from error

    def loop(self, batches: Sequence[Any] = ()) -> Loop:
        """Return the loop to measure, on the given batches; if empty, on the first one."""
        return Loop(
            self.tasks,
            batches or self.take(1),
            device=self._device,
            progress=lambda line: echo(f"{self.workload}: {line}", err=True),
            context=self._context,
            loader=self.loader,
            apart=self._is_apart,
        )

    def tune(self, limits: Limits | None = None, seconds: float = TUNING_S) -> Tuned:
        """Choose a plan by trial."""
        with about_plan(self.workload):
            return tune(self.loop(self.sample()), limits or Limits(), {}, seconds)


def _call(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    if not (function_name and all(map(str.isidentifier, module_name.split(".")))):
        raise UserError(
            f"workload {plain(name)}: name {DEFAULT}, or module:function, such as my_loop:loop"
        )
    # A console script has its own directory on ``sys.path``, not the current one.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        # This also covers a missing import inside of the user's module; the message names the
        # module.
        raise UserError(f"workload {name}: {error}") from error
    if not callable(function):
        raise UserError(f"workload {name}: {module_name} has no function {function_name!r}")
    try:
        return function()
    except BaseException as error:
        add_note(error, f"swpipe: {name} was called without arguments for its tasks and batches")
        raise


# ----------------------------------------------------------------------------------------- plans


def load_plan(name: str) -> PipelinePlan:
    """Return a plan from a file."""
    instead = f"; name a file, {SERIAL}, {PIPELINED} or {AUTO}"
    return load_file(PipelinePlan.load, name, "plan ", instead)


# ----------------------------------------------------------------------------------------- files


def load_file(load: Callable[[Any], T], path: Path | str, what: str = "", instead: str = "") -> T:
    """Return the result of ``load`` for a file.

    Args:
        load: The function that reads the file.
        path: The file.
        what: The beginning of an error message.
        instead: The end of the message if the file cannot be opened.
    """
    try:
        return load(path)
    except (OSError, ValueError, RecursionError) as error:  # PlanError, broken JSON, not text
        advice = instead if isinstance(error, OSError) else ""
        raise UserError(f"{what}{plain(str(path))}: {reason(error)}{advice}") from error


def load_timeline(path: Path) -> Trace:
    """Return a saved timeline, which has at least one task."""
    trace = load_file(Trace.load, path)
    if not trace.spans:
        raise UserError(f"{plain(str(path))}: the timeline is empty: no task ran; record another")
    return trace


def check_outputs(
    context: typer.Context, *paths: Path | None, pictures: Collection[Path | None] = ()
) -> None:
    """Check that files can be written, before there is anything to write.

    Args:
        context: The command's context; of several ranks, only the first one writes.
        *paths: The files, whose directories are created.
        pictures: More files, which matplotlib draws.
    """
    if not _writes(context):
        return
    for path in filter(None, pictures):
        why = ""
        if path.suffix.lower() not in PICTURES:
            why = f"pictures are {', '.join(PICTURES)} files; give it such a name"
        elif find_spec("matplotlib") is None:
            why = "a picture needs matplotlib: pip install 'swpipe[plot]'"
        if why:
            raise UserError(f"{plain(str(path))}: {why}")
    for path in filter(None, (*paths, *pictures)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)
        except OSError as error:
            raise UserError(f"{plain(str(path))}: {reason(error)}") from error


def save(
    context: typer.Context, what: str, path: Path | None, write: Callable[[Path], object]
) -> None:
    """Write a file and print its name, on several ranks on the first one.

    Args:
        context: The command's context.
        what: The beginning of the line that names the file; empty to print none.
        path: The file; None to write nothing.
        write: A function that writes the file.
    """
    if path is None or not _writes(context):
        return
    try:
        write(path)
    except (OSError, ValueError) as error:  # a picture may be too large to draw
        raise UserError(f"{plain(str(path))}: {reason(error)}") from error
    if what:
        echo(f"{what} {plain(str(path))}")


def _writes(context: typer.Context) -> bool:
    return context.obj is None or context.obj.number == 0
