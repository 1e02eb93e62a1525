"""The things that the user names on the command line: workloads, plans and files.

A ``UserError`` says which of them does not exist, is of another kind, or cannot be written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from functools import cached_property, partial
from importlib.util import find_spec
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
import typer

from swpipe._distributed.rank_checks import gather
from swpipe.cli.launched import Rank, agree
from swpipe.cli.user_errors import UserError, about_plan, echo, reason
from swpipe.core.context import context_class
from swpipe.core.files import check_writable
from swpipe.core.loaders import is_apart
from swpipe.core.messages import plain, shown
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import resolve
from swpipe.errors import add_note
from swpipe.pipeline import SWPipeline
from swpipe.planning.limits import Limits
from swpipe.profiler.sampling import Sample
from swpipe.tasks.images.images_workload import IMAGES
from swpipe.tasks.workload import Job, Plans, Workload
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, Tuned, tune

T = TypeVar("T")

AUTO = "auto"
SERIAL = "serial"
"""The name of the plan that is made by trial, and of the plan that every workload has."""

PICTURES = (".png", ".svg", ".pdf")

MOST_MEASURED = 48
"""The number of batches measured from a source that cannot be sampled. Events in every tenth or
sixteenth batch are among them, and a loader soon has made them.
"""

TUNING_S = 60.0
"""The default limit in seconds for choosing a plan."""


class Opened:
    """A workload for one command, under named plans; its job is opened when it is first needed.

    On several ranks, each rank creates one, and all must have been given the same command. It is a
    context manager, which closes the job.

    Args:
        context: The command's context.
        workload: The workload's name as the user gave it.
        device: The device in torch's words; None for the workload's own.
        plans: Names of plans; "" is the workload's usual plan.
        auto: Whether a plan may be made by trial.

    Attributes:
        workload: The workload.
        device: The device in torch's words, on several ranks that of this rank; None for the
            workload's own.
        plans: The names of the plans, the usual plan by its own name.
        tuned: The result of making the plan ``AUTO``, once it was made.
    """

    def __init__(
        self,
        context: typer.Context,
        workload: str,
        device: str | None,
        plans: Sequence[str] = (),
        *,
        auto: bool = False,
    ) -> None:
        rank: Rank | None = context.obj
        self.workload = find_workload(workload, rank)
        self.plans = [name or self.workload.usual_plan for name in plans]
        self.tuned: Tuned | None = None
        # A plan that can be loaded is loaded now, so that a mistake is reported before any work. A
        # plan that needs the job's tasks, or a trial, comes later.
        ready_made: Plans = {SERIAL: lambda: PipelinePlan.serial(self.tasks), **self.workload.plans}
        later = {AUTO} if auto else set()
        later |= {SERIAL} - {*self.workload.plans}
        self._loaded = {
            name: load_plan(name, ready_made) for name in self.plans if name not in later
        }
        # Plans are compared as well as options: a file may differ between nodes.
        agree(context, list(map(self._loaded.get, self.plans)))
        self.device = _checked_device(device, rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        # ``job`` is cached: without an entry in ``vars`` it was never opened.
        if "job" in vars(self):
            self.job.close()

    @cached_property
    def job(self) -> Job:
        """The job of the workload, which is opened on first access."""
        return self.open_job()

    def open_job(self) -> Job:
        """Return a new job of the workload, which the caller has to close."""
        return self.workload.open_job(self.device)

    @cached_property
    def tasks(self) -> tuple[PipelineTask, ...]:
        """The tasks of the job."""
        return tuple(self.job.tasks())

    @property
    def loader(self) -> Iterable[Any] | None:
        """The source of the user's own batches, if it can be restarted; else None."""
        given = self.job.loader if isinstance(self.job, _OwnJob) else None
        # A list costs nothing to call, and an iterator cannot be restarted.
        return None if isinstance(given, Sequence | Iterator) else given

    def plan(self, name: str | None = None) -> PipelinePlan:
        """Return the plan of that name, by default the first; "auto" makes it by trial."""
        name = self.plans[0] if name is None else name
        if name not in self._loaded and name == SERIAL:
            self._loaded[name] = PipelinePlan.serial(self.tasks)
        elif name not in self._loaded:
            self.tuned = self.tune()
            self._loaded[name] = self.tuned.plan
            echo(f"auto: {self.tuned.format()}")
        return self._loaded[name]

    def pipeline(self, plan: PipelinePlan) -> SWPipeline[Any]:
        """Return a pipeline of the job's tasks under a plan."""
        return SWPipeline(plan, self.tasks, device=self.job.device, context=self.job.context)

    def take(self, count: int) -> list[Any]:
        """Return the first ``count`` batches; all ranks take the same number."""
        batches = [*self.job.batches(count)]
        if len(batches) < count:
            raise UserError(
                f"workload {self.workload.name}: it gives {len(batches)} batches, where {count} "
                "are needed; it may return a loader or a generator in place of a list"
            )
        return batches

    def measured(self) -> Sample:
        """Return the sample of the job's batches that is measured."""
        given = self.job.loader if isinstance(self.job, _OwnJob) else None
        try:
            if isinstance(given, Sequence):
                return Sample.of(given)
            return Sample.of(self.job.batches(), MOST_MEASURED)
        except ValueError as error:
            raise UserError(f"workload {self.workload.name}: {error}") from error

    def loop(self, batches: Sequence[Any] = ()) -> Loop:
        """Return the job's tasks and batches, with the streams and the order of its usual plan.

        ``batches`` are the batches to measure on; if empty, the first batch of the job is used.
        """
        make = self.workload.plans.get(self.workload.usual_plan)
        loader = self.job.loader if isinstance(self.job, _OwnJob) else None
        return Loop(
            self.tasks,
            batches or self.take(1),
            device=self.job.device,
            like=None if make is None else make(),
            progress=lambda line: echo(f"{self.workload.name}: {line}", err=True),
            context=self.job.context,
            loader=self.loader,
            # The image model's batches are apart, and an iterator is assumed to be apart.
            apart=loader is None or isinstance(loader, Iterator) or is_apart(loader),
        )

    def tune(self, limits: Limits | None = None, seconds: float = TUNING_S) -> Tuned:
        """Choose a plan for the job by trial."""
        others = {name: make() for name, make in self.workload.plans.items() if name != SERIAL}
        with about_plan(self.workload.name):
            return tune(self.loop(self.measured()), limits or Limits(), others, seconds)


def find_workload(name: str, rank: Rank | None = None) -> Workload:
    """Return the image model's workload, or the user's own ``module:function``."""
    if name == IMAGES.name and rank is None:
        return IMAGES
    if name == IMAGES.name:
        raise UserError(
            f"workload {name}: it runs in one process; under torchrun give --workload "
            "module:function, which is called on each rank"
        )
    if ":" not in name:
        raise UserError(
            f"workload {plain(name)}: name {IMAGES.name}, or module:function of a loop of yours"
        )
    return Workload(name, {}, usual_plan=SERIAL, open_job=partial(_OwnJob, name, rank))


def _checked_device(device: str | None, rank: Rank | None) -> str | None:
    """Return the device that the user named, or the device of this rank."""
    if device is not None:
        # A tensor is created to find out whether the device works, not only whether its name is
        # valid.
        try:
            resolve(device)
            torch.empty(0, device=device)
        except (RuntimeError, ValueError, AssertionError) as error:  # torch without CUDA asserts
            raise UserError(f"--device {plain(device)}: {str(error).splitlines()[0]}") from error
    if rank is None:
        return device
    # The process group is formed here, before the job is opened, because a job may use it.
    return rank.join(device or resolve(None).type)


# ------------------------------------------------------------------------------ the user's own


class _OwnJob(Job):
    """The job that ``module:function`` returns: tasks in serial order, batches, context class.

    The module is also searched for in the current directory. On several ranks, the function is
    called after the process group was formed.
    """

    def __init__(self, name: str, rank: Rank | None, device: str | None) -> None:
        # The checks name what the function returned, because the user sees no traceback.
        given = _call(name)
        tuple_of_some = isinstance(given, tuple) and len(given) in (2, 3)
        if not (tuple_of_some and all(isinstance(part, Iterable) for part in given[:2])):
            raise UserError(
                f"workload {name}: it gave {shown(given)}; return (tasks, batches), both of which "
                "can be iterated over, or (tasks, batches, context)"
            )
        tasks, self.loader, *context = given
        try:
            self.context = context_class(context[0] if context else None)
        except TypeError as error:
            raise UserError(f"workload {name}: {'; '.join(str(error).splitlines())}") from error
        self.device = device
        self._tasks = tuple(tasks)
        self._rank = rank
        for task in self._tasks:
            if not isinstance(task, PipelineTask):
                raise UserError(
                    f"workload {name}: {shown(task)} among its tasks is no PipelineTask; "
                    "@swpipe.task makes one of a function"
                )

    def tasks(self) -> tuple[PipelineTask, ...]:
        return self._tasks

    def batches(self, steps: int | None = None, /) -> Iterator[Any]:
        return islice(self.loader, steps)

    @property
    def epoch_steps(self) -> int:
        if not isinstance(self.loader, Sized):
            raise UserError("--steps: say how many; the workload's batches have no length")
        return len(self.loader)

    def over_ranks(self, value: Any, /) -> list[Any]:
        return [value] if self._rank is None else gather(value)


def _call(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    # A path such as ``my_loop.py:loop`` would otherwise be reported as a missing module ``py``.
    is_module = all(map(str.isidentifier, module_name.split("."))) and module_name[-3:] != ".py"
    if not (is_module and function_name):
        raise UserError(f"workload {plain(name)}: name it as module:function, such as my_loop:loop")
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
    # Binding first tells a function with required arguments apart from a TypeError raised inside.
    try:
        signature(function).bind()
    except ValueError:  # a C function without a signature
        pass
    except TypeError as error:
        raise UserError(
            f"workload {name}: {error}; name a function that is called without arguments"
        ) from error
    try:
        return function()
    except BaseException as error:
        add_note(error, f"swpipe: while {name} was called for its tasks and batches")
        raise


# ----------------------------------------------------------------------------------------- plans


def load_plan(name: str, plans: Plans) -> PipelinePlan:
    """Return a ready-made plan by its name, or a plan from a file."""
    if name in plans:
        return plans[name]()
    here = ", ".join(plans)
    if name == AUTO:
        raise UserError(
            "plan auto: train and profile make one; elsewhere name a file that `swpipe plan auto` "
            f"has written; here there are {here}"
        )
    try:
        return PipelinePlan.load(name)
    except OSError as error:
        raise UserError(
            f"plan {plain(name)}: {reason(error)}; name a file, or one of {here}"
        ) from error
    except (ValueError, RecursionError) as error:  # PlanError, broken TOML or JSON, not text
        raise UserError(f"plan {plain(name)}: {reason(error)}") from error


# ----------------------------------------------------------------------------------------- files


def load_file(load: Callable[[Path], T], path: Path, what: str = "") -> T:
    """Return the result of ``load`` for a file; the text ``what`` begins an error message."""
    try:
        return load(path)
    except (OSError, ValueError, RecursionError) as error:  # PlanError, broken JSON, not text
        raise UserError(f"{what}{plain(str(path))}: {reason(error)}") from error


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


class Output(NamedTuple):
    """A file that the user wants.

    Attributes:
        what: The beginning of the line that names the file.
        path: The file; None to write nothing.
        write: A function that writes the file.
    """

    what: str
    path: Path | None
    write: Callable[[Path], object]


def save(context: typer.Context, *outputs: Output, quiet: bool = False) -> None:
    """Write files and print their names; if one cannot be written, still write the rest."""
    failed = []
    for what, path, write in outputs:
        if path is not None and _writes(context):
            try:
                write(path)
            except (OSError, ValueError) as error:  # a picture may be too large to draw
                failed.append(f"{plain(str(path))}: {reason(error)}")
            else:
                if not quiet:
                    echo(f"{what} {plain(str(path))}")
    if failed:
        raise UserError("; ".join(failed))


def _writes(context: typer.Context) -> bool:
    return context.obj is None or context.obj.number == 0
