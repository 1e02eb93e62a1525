"""What the user names on the command line: plans, workloads, files.

A ``UserError`` says what of that is not there, is something else, or cannot be written.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from swpipe._distributed.rank_checks import gather
from swpipe.cli.launched import Rank
from swpipe.cli.user_errors import UserError, about_plan, echo, reason
from swpipe.core.context import TypedContext, context_class
from swpipe.core.files import check_writable, parse_json
from swpipe.core.messages import plain, shown
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import resolve
from swpipe.errors import add_note
from swpipe.planning.limits import Limits
from swpipe.profiler import ProfileResult, ProfileResults
from swpipe.tasks.workload import Job, Plans, Workload, workloads
from swpipe.trace import Trace
from swpipe.tuning.autotuning import Loop, Tuned, autotune

T = TypeVar("T")

AUTO = "auto"
"""The plan that is yet to be made."""

PICTURES = (".png", ".svg", ".pdf")

MEASURED = 3
"""Batches that costs are measured on and plans tried with."""

TUNING_S = 60.0
"""What it takes to choose a plan, at most, unless the user gives another time."""

# ------------------------------------------------------------------------------------- workloads


def find_workload(name: str, rank: Rank | None = None) -> Workload:
    """The registered workload of that name, or the user's own ``module:function``."""
    known = workloads()
    if name in known:
        found = known[name] if rank is None else known[name].on_ranks
        if found is None:
            raise UserError(f"workload {name}: it has no form for several ranks")
        return found
    if ":" not in name:
        known_names = ", ".join(known)
        raise UserError(f"workload {plain(name)}: name one of {known_names}, or module:function")

    def open_job(config: _OwnConfig) -> _OwnJob:
        return _OwnJob(name, rank)

    return Workload(
        name,
        plans={},
        usual_plan="serial",
        configure=lambda options: _OwnConfig(options["device"]),
        open_job=open_job,
    )


def configured(workload: Workload, options: Mapping[str, Any], rank: Rank | None) -> Any:
    """The workload's configuration, on this rank's device.

    On ranks, each node's first rank makes what is missing before the others look for it.
    """
    if options["device"] is not None:
        _check_device(options["device"])
    make = partial(workload.configure, options)
    if rank is None:
        return make()
    config = rank.first(make)
    return replace(config, device=rank.join(config.device or resolve(None).type))


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
        self._tasks, self._rank = tuple(tasks), rank
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


def context_of(job: Job) -> type[TypedContext] | None:
    """The class of a job's contexts; None where the job names none."""
    return job.context if isinstance(job, _OwnJob) else None


def loader_of(job: Job) -> Iterable[Any] | None:
    """What the user's own job takes its batches from, if that can be begun again; else None."""
    given = job.loader if isinstance(job, _OwnJob) else None
    return None if isinstance(given, Sequence | Iterator) else given


def _call(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    is_module = all(map(str.isidentifier, module_name.split("."))) and module_name[-3:] != ".py"
    if not (is_module and function_name):
        raise UserError(f"workload {plain(name)}: name it as module:function, such as my_loop:loop")
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


def _check_device(device: str) -> None:
    try:
        resolve(device)
        torch.empty(0, device=device)
    except (RuntimeError, ValueError, AssertionError) as error:  # torch without CUDA asserts
        raise UserError(f"--device {plain(device)}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class OpenWorkload:
    """A workload with a job of it.

    Attributes:
        workload: The workload.
        job: The job.
        device: Where the job works; None for the machine's accelerator, or else the CPU.
    """

    workload: Workload
    job: Job
    device: str | None

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], rank: Rank | None) -> OpenWorkload:
        """Open the workload of that name."""
        workload = find_workload(name, rank)
        config = configured(workload, options, rank)
        return cls(workload, workload.open_job(config), config.device)

    @property
    def plans(self) -> Plans:
        """The ready-made plans; the serial one is always there."""
        tasks = tuple(self.job.tasks())
        return {"serial": lambda: PipelinePlan.serial(tasks), **self.workload.plans}

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

    def loop(self, batches: int = 1) -> Loop:
        """Its tasks and first batches, with what its usual plan says about streams and order."""
        return Loop(tuple(self.job.tasks()), self.take(batches), **self._known())

    def tune(
        self,
        limits: Limits | None = None,
        seconds: float = TUNING_S,
        max_bytes: int | None = None,
    ) -> Tuned:
        """Choose a plan for it, by trial."""
        with about_plan(self.workload.name):
            return autotune(
                self.job.tasks(),
                self.take(MEASURED),
                limits=limits,
                seconds=seconds,
                max_bytes=max_bytes,
                verbose=True,
                ready_made={
                    name: make() for name, make in self.workload.plans.items() if name != "serial"
                },
                **self._known(),
            )

    def _known(self) -> dict[str, Any]:
        make = self.workload.plans.get(self.workload.usual_plan)
        schedule = {} if make is None else make().schedule
        return {
            "device": self.device,
            "context": context_of(self.job),
            "streams": {t: e.stream for t, e in schedule.items() if e.stream is not None},
            "ordered": frozenset(t for t, e in schedule.items() if e.globally_ordered),
            "over_ranks": self.job.over_ranks,
            "loader": loader_of(self.job),
            "progress": lambda line: echo(f"{self.workload.name}: {line}", err=True),
        }


# ----------------------------------------------------------------------------------------- plans


def load_plan(name: str, plans: Plans) -> PipelinePlan:
    """A ready-made plan by its name, or one from a file."""
    if name in plans:
        return plans[name]()
    if name == AUTO:
        raise UserError(
            "plan auto: train and profile make one; elsewhere name a file that `swpipe plan auto` "
            f"has written; here there are {', '.join(plans)}"
        )
    if where := _elsewhere(name, plans):
        raise UserError(f"plan {name}: it is for {where}; here there are {', '.join(plans)}")
    try:
        return PipelinePlan.load(name)
    except OSError as error:
        raise UserError(
            f"plan {plain(name)}: {reason(error)}; name a file, or one of {', '.join(plans)}"
        ) from error
    except ValueError as error:  # PlanError, broken TOML or JSON, and bytes that are no text
        raise UserError(f"plan {plain(name)}: {reason(error)}") from error


def _elsewhere(name: str, plans: Plans) -> str:
    """Which form of a workload has the plan, where it is the other form's plans that count."""
    for work in workloads().values():
        forms = {"in one process": work, "under torchrun": work.on_ranks}
        for other in (place for place, form in forms.items() if form and name in form.plans):
            if any(form and set(plans) == set(form.plans) for form in forms.values()):
                return f"the job {other}"
    return ""


# ----------------------------------------------------------------------------------------- files


def load_file(load: Callable[[Path], T], path: Path, what: str = "") -> T:
    """What ``load`` makes of a file, a timeline or a cost model; ``what`` begins the error."""
    try:
        return load(path)
    except (OSError, ValueError) as error:  # PlanError, broken JSON, and bytes that are no text
        raise UserError(f"{what}{plain(str(path))}: {reason(error)}") from error


def load_profile(path: Path) -> ProfileResults:
    """A saved profile, of one batch or of several."""

    def load(path: Path) -> ProfileResults:
        text = path.read_text(encoding="utf-8")
        if isinstance(parse_json(text), list):
            return ProfileResults.from_json(text)
        return ProfileResults([ProfileResult.from_json(text)])

    return load_file(load, path)


def load_timeline(path: Path) -> Trace:
    """A saved timeline of at least one task."""
    trace = load_file(Trace.load, path)
    if not trace.spans:
        raise UserError(f"{plain(str(path))}: the timeline is empty: no task ran; record another")
    return trace


def check_outputs(
    rank: Rank | None, *paths: Path | None, pictures: Collection[Path | None] = ()
) -> None:
    """Make sure that files can be written, before there is anything to write.

    Args:
        rank: This process as one rank of several, of which the first writes.
        *paths: Their directories are made.
        pictures: More of them, which matplotlib draws.
    """
    if not _writes(rank):
        return
    for path in (path for path in pictures if path is not None):
        if path.suffix.lower() not in PICTURES:
            rule = f"pictures are {', '.join(PICTURES)} files"
            raise UserError(f"{plain(str(path))}: {rule}; give it such a name")
        if find_spec("matplotlib") is None:
            raise UserError(
                f"{plain(str(path))}: a picture needs matplotlib: pip install 'swpipe[plot]'"
            )
    for path in (path for path in (*paths, *pictures) if path is not None):
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


def save(rank: Rank | None, *outputs: Output) -> None:
    """Write files and say where they are; where one cannot be written, the others still are."""
    failed = []
    for what, path, write in outputs:
        if path is not None and _writes(rank):
            try:
                write(path)
            except (OSError, ValueError) as error:  # a picture may be too large
                failed.append(f"{plain(str(path))}: {reason(error)}")
            else:
                echo(f"{what} {plain(str(path))}")
    if failed:
        raise UserError("; ".join(failed))


def _writes(rank: Rank | None) -> bool:
    return rank is None or rank.number == 0


def names(given: Collection[str] | None) -> tuple[str, ...]:
    """``a,b`` and ``a`` ``b`` alike."""
    return tuple(name for text in given or () for name in text.split(",") if name)
