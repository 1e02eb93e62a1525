"""All ways to run the training, behind one interface."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, ClassVar

from torch import Tensor

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.loops import ResumableLoop
from swpipe.schedulable import SchedulablePipeline, Schedule, Stage, StreamPool, Task
from tests.contract.training import LOADERS, Stumbled, Stumbling, Training


class Way:
    """A way to run the training by swpipe.

    Attributes:
        loaders: The kinds of loader that it may have. Under a plan of the user's own, batches are
            pulled within ``progress``: what a loader draws there is the plan's author's business.
        draws: The model may draw as in the plain loop; a task with ``random=True`` has draws of its
            own.
        fails: The calls that may fail without a loss. Under a plan of the user's own, an error of a
            task comes at once, and all iterations in flight are dropped, also earlier ones.
        goes_on: Whether the next call continues after an iterator's error; a loop has ended.
        drains: Whether it has ``drain``.
        replays: Whether it has ``replay``, which is used if nothing is in flight.
    """

    loaders: ClassVar[tuple[str, ...]] = tuple(LOADERS)
    draws: ClassVar[bool] = True
    fails: ClassVar[tuple[str, ...]] = ("loader", "decode", "step")
    goes_on: ClassVar[bool] = False
    drains: ClassVar[bool] = False
    replays: ClassVar[bool] = False

    def __init__(self, training: Training) -> None:
        self.training = training
        self._pass: Generator[Tensor | Stumbled] | None = None

    def _begin(self) -> Generator[Tensor | Stumbled]:
        """Return a generator of the losses of one pass, and of errors after which it continues."""
        raise NotImplementedError

    def next(self) -> Tensor | Stumbled | None:
        """Return the loss of the next step, or the iterator's error; None at the end of a pass."""
        if self._pass is None:
            self._pass = self._begin()
        try:
            return next(self._pass)
        except BaseException as error:
            self._pass = None
            if isinstance(error, StopIteration):
                return None
            raise

    def leave(self) -> None:
        """Leave the pass."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def drain(self) -> list[Tensor]:
        """Finish the iterations in flight, and return their losses."""
        raise NotImplementedError

    def replay(self, on: bool) -> None:
        """Begin to replay decode's next result, or stop replaying."""
        raise NotImplementedError

    def state_dict(self) -> Any:
        """Return the state from which a new object continues with the next step."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


# ------------------------------------------------------------------------------ around a loader


class _Loop(Way):
    loop: Any

    def _begin(self) -> Generator[Tensor]:
        for ctx in self.loop:
            yield ctx.loss.detach()

    def state_dict(self) -> Any:
        """Return the state; after a pass that was left, that of a new pass, as in a plain loop."""
        return self.loop.state_dict(rest=None if self._pass is not None else False)

    def load_state_dict(self, state: Any) -> None:
        self.loop.load_state_dict(state)

    def close(self) -> None:
        self.leave()
        self.loop.close()


class Overlap(_Loop):
    """``overlap`` with a loader that is declared to be apart."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.loop = swpipe.overlap(
            training.loader, tasks_of(training), pull_ahead=True, device="cpu"
        )


class OverlapInTurn(_Loop):
    """``overlap`` without a declaration for the loader."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.loop = swpipe.overlap(training.loader, tasks_of(training), device="cpu")


class OverlapWithinBody(_Loop):
    """``overlap`` of decode, with the rest of the step in the body of the loop."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        decode = tasks_of(training)[:1]
        self.loop = swpipe.overlap(training.loader, decode, pull_ahead=True, device="cpu")

    def _begin(self) -> Generator[Tensor]:
        for ctx in self.loop:
            yield trained(self.training, ctx.batch, ctx.x)


class Ahead(_Loop):
    """``for rows, x in ahead(loader, decode)``."""

    workers = 1

    def __init__(self, training: Training) -> None:
        super().__init__(training)

        def decode(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows, training.decode(rows)

        loader, workers = training.loader, self.workers
        self.loop = swpipe.ahead(loader, decode, device="cpu", workers=workers)

    def _begin(self) -> Generator[Tensor]:
        for rows, x in self.loop:
            yield trained(self.training, rows, x)


class AheadByWorkers(Ahead):
    """``ahead`` with decode on three batches at once."""

    workers = 3


class Through(_Loop):
    """``through(loader, decode, on_caller(step))``."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)

        def decode(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows, training.decode(rows)

        def step(batch: tuple[Tensor, Tensor]) -> Tensor:
            return trained(training, *batch)

        self.loop = swpipe.through(training.loader, decode, swpipe.on_caller(step), device="cpu")

    def _begin(self) -> Generator[Tensor]:
        yield from self.loop


# ------------------------------------------------------------------------------------ by a plan


class Piped(Way):
    """``progress`` of a pipeline with decode two iterations ahead on a thread of its own."""

    loaders = ("list",)
    draws = False
    fails = ("step",)
    goes_on = True
    drains = True
    replays = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        tasks = tasks_of(training)
        self.pipe: Any = SWPipeline(self.plan(tasks), tasks, device="cpu")
        self._left: Iterator[Tensor] | None = None
        self._done = 0  # of this pass

    def plan(self, tasks: list[PipelineTask]) -> PipelinePlan:
        return piped(tasks)

    def _begin(self) -> Generator[Tensor | Stumbled]:
        if self._left is None:
            self._left = Stumbling(self.training.loader, self.training.failing)
        finished = False
        try:
            while True:
                try:
                    loss = self._loss(self.pipe.progress(self._left))
                except Stumbled as error:
                    self._done += 1
                    yield error
                    continue
                except StopIteration:
                    finished = True
                    return
                self._done += 1
                yield loss
        finally:
            if not finished:
                self.pipe.drop()
            self._left, self._done = None, 0

    def _loss(self, out: Any) -> Tensor:
        return out.loss.detach()

    def drain(self) -> list[Tensor]:
        found = [self._loss(out) for out in self.pipe.drain()]
        self._done += len(found)
        return found

    def replay(self, on: bool) -> None:
        (self.pipe.enable_shortcut if on else self.pipe.disable_shortcut)("decode")

    def state_dict(self) -> Any:
        """Return the state of a drained pipeline, and the place in the data, as a user would."""
        return {"pipe": self.pipe.state_dict(), "done": self._done}

    def load_state_dict(self, state: Any) -> None:
        self.pipe.load_state_dict(state["pipe"])
        self._done = state["done"]
        self._left = islice(iter(self.training.loader), self._done, None)

    def close(self) -> None:
        self.leave()
        self.pipe.close()


class Serial(Piped):
    """``progress`` under the serial plan."""

    def plan(self, tasks: list[PipelineTask]) -> PipelinePlan:
        return PipelinePlan.serial(tasks)


class PulledByAGroup(Piped):
    """``progress`` with a thread that pulls."""

    def plan(self, tasks: list[PipelineTask]) -> PipelinePlan:
        return piped(tasks, pull_group="loader")


class PulledForWorkers(Piped):
    """``progress`` with a thread that pulls, and three threads that decode."""

    def plan(self, tasks: list[PipelineTask]) -> PipelinePlan:
        plan = piped(tasks, pull_group="loader")
        entry = TaskSchedule(stage=0, thread_group="io", workers=3)
        return replace(plan, schedule={**plan.schedule, "decode": entry})


class WithinCalls(Piped):
    """``progress`` under a plan with ``within_calls``."""

    def plan(self, tasks: list[PipelineTask]) -> PipelinePlan:
        return piped(tasks, within_calls=True)


class Looped(_Loop):
    """A pipeline with a plan in a ``ResumableLoop``."""

    loaders = ("list", "own generator")
    draws = False
    fails = ("step",)

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        tasks = tasks_of(training)
        self.pipe = SWPipeline(piped(tasks), tasks, device="cpu")
        self.loop = ResumableLoop(self.pipe, training.loader)

    def close(self) -> None:
        self.leave()
        self.pipe.close()


class Scheduled(Piped):
    """A ``SchedulablePipeline`` of tasks with slots."""

    replays = False

    def __init__(self, training: Training) -> None:
        Way.__init__(self, training)

        def decode(ctx: Any) -> None:
            ctx.slots.set("x", training.decode(ctx.slots["batch_cpu"]))

        def train(ctx: Any) -> None:
            loss = trained(training, ctx.slots["batch_cpu"], ctx.slots["x"])
            ctx.slots.set("step_result", loss)

        tasks = (
            Task.from_fn("decode", decode, reads=["batch_cpu"], writes=["x"], lookahead=2),
            Task.from_fn("train", train, reads=["batch_cpu", "x"], writes=["step_result"]),
        )
        pool = StreamPool({"default": None})
        self._scheduled = SchedulablePipeline(Schedule((Stage(tasks),), ("default",)), pool)
        self.pipe = _Both(self._scheduled)
        self._left, self._done = None, 0

    def _loss(self, out: Any) -> Tensor:
        assert isinstance(out, Tensor)
        return out


class _Both:
    """A pipeline with the ``progress`` and ``drain`` of a ``SchedulablePipeline``."""

    def __init__(self, scheduled: SchedulablePipeline) -> None:
        self.progress, self.drain = scheduled.progress, scheduled.drain
        self.close, self._pipe = scheduled.shutdown, scheduled.pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def piped(tasks: list[PipelineTask], **more: Any) -> PipelinePlan:
    """Return a plan with the first task two stages ahead of the others, on its own thread."""
    first, *others = (task.name for task in tasks)
    return PipelinePlan(
        schedule={
            first: TaskSchedule(stage=0, thread_group="io"),
            **{name: TaskSchedule(stage=2) for name in others},
        },
        deps=[(after, before) for before, after in pairwise(task.name for task in tasks)],
        **more,
    )


def tasks_of(training: Training) -> list[PipelineTask]:
    """Return the tasks; only decode has a declaration, ``pure``."""

    def decode(ctx: Any) -> None:
        ctx.x = training.decode(ctx.batch)

    def forward(ctx: Any) -> None:
        ctx.loss = training.forward(ctx.x)

    def backward(ctx: Any) -> None:
        training.backward(ctx.loss)

    def step(ctx: Any) -> None:
        training.step(ctx.batch)

    return [
        PipelineTask("decode", decode, pure=True),
        PipelineTask("forward", forward),
        PipelineTask("backward", backward),
        PipelineTask("step", step),
    ]


def trained(training: Training, rows: Tensor, x: Tensor) -> Tensor:
    """Run the rest of a step, as a loop's body does, and return the loss."""
    loss = training.forward(x)
    training.backward(loss)
    training.step(rows)
    return loss.detach()


WAYS = (
    Ahead, AheadByWorkers, Through, Overlap, OverlapInTurn, OverlapWithinBody,
    Serial, Piped, PulledByAGroup, PulledForWorkers, WithinCalls, Looped, Scheduled,
)  # fmt: skip
