"""What the user names on the command line: workloads, plans, files.

A ``UserError`` says what of that is not there, is something else, or cannot be written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
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
from swpipe.tasks.workload import Job, Plans, Workload, workloads
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, Tuned, tune

T = TypeVar("T")

AUTO = "auto"
SERIAL = "serial"
"""The plan that is yet to be made, and the one that every workload has."""

PICTURES = (".png", ".svg", ".pdf")

MOST_MEASURED = 48
"""Batches that are measured of those that cannot be chosen from: what comes every tenth or
sixteenth time is among them, and a loader has made them before long."""

TUNING_S = 60.0
"""What it takes to choose a plan, at most, unless the user gives another time."""


class Opened:
    """A workload for one command, under named plans; its job is opened when it is first needed.

    On several ranks each makes one, and all must have been given the same command. A context
    manager, which closes the job.

    Args:
        context: The command's.
        workload: As the user names it.
        given: Values of the workload's options, and of ``device``.
        plans: Names; "" is the workload's usual plan.
        auto: Whether a plan may be made by trial.

    Attributes:
        workload: The workload, in its form for ranks where there are ranks.
        config: Its configuration.
        tuned: How the plan ``AUTO`` was made, once it was.
    """

    def __init__(
        self,
        context: typer.Context,
        workload: str,
        given: Mapping[str, Any],
        plans: Sequence[str] = (),
        *,
        auto: bool = False,
    ) -> None:
        rank: Rank | None = context.obj
        self.workload = find_workload(workload, rank)
        self.plans = [name or self.workload.usual_plan for name in plans]
        self.tuned: Tuned | None = None
        ready_made: Plans = {SERIAL: lambda: PipelinePlan.serial(self.tasks), **self.workload.plans}
        later = {AUTO} if auto else set()
        later |= {SERIAL} - {*self.workload.plans}
        self._loaded = {
            name: load_plan(name, ready_made) for name in self.plans if name not in later
        }
        agree(context, list(map(self._loaded.get, self.plans)))
        defaults = {option.name: option.default for option in self.workload.options}
        self.config = _configured(self.workload, {**defaults, **given}, rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if "job" in vars(self):
            self.job.close()

    @cached_property
    def job(self) -> Job:
        """A job of the workload."""
        return self.workload.open_job(self.config)

    @cached_property
    def tasks(self) -> tuple[PipelineTask, ...]:
        """The job's."""
        return tuple(self.job.tasks())

    @property
    def loader(self) -> Iterable[Any] | None:
        """What the user's own job takes its batches from, if it can be begun again; else None."""
        given = self.job.loader if isinstance(self.job, _OwnJob) else None
        return None if isinstance(given, Sequence | Iterator) else given

    def plan(self, name: str | None = None) -> PipelinePlan:
        """The plan of that name, by default the first one; auto makes it by trial."""
        name = self.plans[0] if name is None else name
        if name not in self._loaded and name == SERIAL:
            self._loaded[name] = PipelinePlan.serial(self.tasks)
        elif name not in self._loaded:
            self.tuned = self.tune()
            self._loaded[name] = self.tuned.plan
            echo(f"auto: {self.tuned.format()}")
        return self._loaded[name]

    def pipeline(self, plan: PipelinePlan) -> SWPipeline[Any]:
        """The job's tasks under a plan."""
        return SWPipeline(plan, self.tasks, device=self.config.device, context=self.job.context)

    def take(self, count: int) -> list[Any]:
        """The first few batches; on several ranks all take as many."""
        return list(self.pulled(count))

    def pulled(self, count: int) -> Iterator[Any]:
        """The same, each of them pulled when it is asked for."""
        taken = 0
        for taken, batch in enumerate(self.job.batches(count), 1):  # noqa: B007 - for the error
            yield batch
        if taken < count:
            raise UserError(
                f"workload {self.workload.name}: it gives {taken} batches, where {count} are "
                "needed; it may return a loader or a generator in place of a list"
            )

    def measured(self) -> Sample:
        """Return the sample of its batches that is measured."""
        given = self.job.loader if isinstance(self.job, _OwnJob) else None
        try:
            if isinstance(given, Sequence):
                return Sample.of(given)
            return Sample.of(self.job.batches(), MOST_MEASURED)
        except ValueError as error:
            raise UserError(f"workload {self.workload.name}: {error}") from error

    def loop(self, batches: Sequence[Any] = ()) -> Loop:
        """Its tasks and batches, with what its usual plan says about streams and order.

        ``batches``: Those to measure on; empty for the first one.
        """
        make = self.workload.plans.get(self.workload.usual_plan)
        loader = self.job.loader if isinstance(self.job, _OwnJob) else None
        return Loop(
            self.tasks,
            batches or self.take(1),
            device=self.config.device,
            like=None if make is None else make(),
            over_ranks=self.job.over_ranks,
            progress=lambda line: echo(f"{self.workload.name}: {line}", err=True),
            context=self.job.context,
            loader=self.loader,
            apart=loader is None or isinstance(loader, Iterator) or is_apart(loader),
        )

    def tune(self, limits: Limits | None = None, seconds: float = TUNING_S) -> Tuned:
        """Choose a plan for it, by trial."""
        others = {name: make() for name, make in self.workload.plans.items() if name != SERIAL}
        loop = replace(self.loop(self.measured()), progress=lambda line: None)  # the bar shows them
        with about_plan(self.workload.name):
            return tune(loop, limits or Limits(), others, seconds, verbose=True)


def find_workload(name: str, rank: Rank | None = None) -> Workload:
    """The registered workload of that name, or the user's own ``module:function``."""
    known = workloads()
    if name in known and rank is None:
        return known[name]
    if name in known:
        raise UserError(
            f"workload {name}: it runs in one process; under torchrun give --workload "
            "module:function, which is called on each rank"
        )
    if ":" not in name:
        raise UserError(
            f"workload {plain(name)}: name one of {', '.join(sorted(known))}, or module:function"
        )

    def open_job(config: _OwnConfig) -> _OwnJob:
        return _OwnJob(name, rank)

    return Workload(
        name,
        plans={},
        usual_plan=SERIAL,
        configure=lambda options: _OwnConfig(options["device"]),
        open_job=open_job,
    )


def _configured(workload: Workload, options: Mapping[str, Any], rank: Rank | None) -> Any:
    """Return the workload's configuration, with this rank's device."""
    if (device := options["device"]) is not None:
        try:
            resolve(device)
            torch.empty(0, device=device)
        except (RuntimeError, ValueError, AssertionError) as error:  # torch without CUDA asserts
            raise UserError(f"--device {plain(device)}: {str(error).splitlines()[0]}") from error
    config = workload.configure(options)
    if rank is None:
        return config
    return replace(config, device=rank.join(config.device or resolve(None).type))


# ------------------------------------------------------------------------------ the user's own


@dataclass(frozen=True, slots=True)
class _OwnConfig:
    device: str | None


class _OwnJob(Job):
    """What ``module:function`` returns: tasks in serial order, batches, and a class of contexts.

    The current directory is searched for the module, too. On several ranks the function is called
    when there is a process group.
    """

    def __init__(self, name: str, rank: Rank | None) -> None:
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
    is_module = all(map(str.isidentifier, module_name.split("."))) and module_name[-3:] != ".py"
    if not (is_module and function_name):
        raise UserError(f"workload {plain(name)}: name it as module:function, such as my_loop:loop")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ModuleNotFoundError as error:
        raise UserError(f"workload {name}: {error}") from error
    if not callable(function):
        raise UserError(f"workload {name}: {module_name} has no function {function_name!r}")
    try:
        signature(function).bind()
    except ValueError:  # written in C, without a signature
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
    """A ready-made plan by its name, or one from a file."""
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
    except (ValueError, RecursionError) as error:  # PlanError, broken TOML or JSON, no text
        raise UserError(f"plan {plain(name)}: {reason(error)}") from error


# ----------------------------------------------------------------------------------------- files


def load_file(load: Callable[[Path], T], path: Path, what: str = "") -> T:
    """What ``load`` makes of a file; ``what`` begins the error."""
    try:
        return load(path)
    except (OSError, ValueError, RecursionError) as error:  # PlanError, broken JSON, no text
        raise UserError(f"{what}{plain(str(path))}: {reason(error)}") from error


def load_timeline(path: Path) -> Trace:
    """A saved timeline of at least one task."""
    trace = load_file(Trace.load, path)
    if not trace.spans:
        raise UserError(f"{plain(str(path))}: the timeline is empty: no task ran; record another")
    return trace


def check_outputs(
    context: typer.Context, *paths: Path | None, pictures: Collection[Path | None] = ()
) -> None:
    """Make sure that files can be written, before there is anything to write.

    Args:
        context: The command's; of several ranks the first writes.
        *paths: Their directories are made.
        pictures: More of them, which matplotlib draws.
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
        what: How the line begins that names the file.
        path: None writes nothing.
        write: Writes it.
    """

    what: str
    path: Path | None
    write: Callable[[Path], object]


def save(context: typer.Context, *outputs: Output, quiet: bool = False) -> None:
    """Write files and say where they are; where one cannot be written, the others still are."""
    failed = []
    for what, path, write in outputs:
        if path is not None and _writes(context):
            try:
                write(path)
            except (OSError, ValueError) as error:  # a picture may be too large
                failed.append(f"{plain(str(path))}: {reason(error)}")
            else:
                if not quiet:
                    echo(f"{what} {plain(str(path))}")
    if failed:
        raise UserError("; ".join(failed))


def _writes(context: typer.Context) -> bool:
    return context.obj is None or context.obj.number == 0
