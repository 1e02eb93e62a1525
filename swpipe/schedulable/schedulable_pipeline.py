"""``SchedulablePipeline``, which runs a schedule, and ``Pipeline``, which runs a list of tasks.

A schedule is translated into a plan. ``SWPipeline`` runs the plan, and handles failures, the end of
an iterator and races.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan
from swpipe.device import Device
from swpipe.pipeline import PipelineOptions, SWPipeline
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.executors import (
    DelegatedPipeline,
    ThreadedExecutor,
    ThreadMap,
    checked_executor,
    delegated,
    is_ours,
    threads_of,
)
from swpipe.schedulable.schedule import Schedule, Stage
from swpipe.schedulable.schedule_rules import check_stages, in_words_of
from swpipe.schedulable.slot_context import RESULT, Home, TaskContext, TaskPlace
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool
from swpipe.schedulable.training_tasks import training_tasks
from swpipe.schedulable.translation import translate


class ScheduleOptions(PipelineOptions, total=False):
    """The options of ``SchedulablePipeline``, which functions that make one pass on."""

    run_ahead: int | None


class SchedulablePipeline:
    """A pipeline that runs a schedule (seed section 3.5).

    Use it as a context manager, or call ``shutdown``.

    Args:
        schedule: The schedule of the tasks.
        stream_pool: The streams that the tasks name.
        executor: None to run all tasks on the caller's thread; ``"threaded"`` for one thread per
            stream; a ``SequentialExecutor`` or ``ThreadedExecutor``; or an object with the methods
            of ``swpipe.schedulable.executors.Executor``.
        device: See ``SWPipeline``.
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.
        options: Options of ``SWPipeline``, such as ``check_effects``.

    Attributes:
        schedule: The schedule.
        plan: The plan of the schedule.
        pipe: The ``SWPipeline`` that runs the plan.

    Raises:
        ScheduleValidationError: Lists all that is wrong with the schedule, or with the executor's
            ``thread_map`` for it.
        TypeError: An argument is of another kind.
    """

    def __init__(
        self,
        schedule: Schedule,
        stream_pool: StreamPool,
        *,
        executor: Any = None,
        device: Device | torch.device | str | None = None,
        run_ahead: int | None = None,
        **options: Unpack[PipelineOptions],
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule is {shown(schedule)}: give a Schedule")
        if not isinstance(stream_pool, StreamPool):
            raise TypeError(f"stream_pool is {shown(stream_pool)}: give a StreamPool")
        self._executor = checked_executor(executor)
        tasks = schedule.all_tasks()
        threads, problems = threads_of(self._executor, tasks)
        kind: type[SWPipeline[IterContext]] = SWPipeline
        # The executor's problems are reported together with those of the schedule.
        check_stages(schedule, stream_pool, problems)
        # The tasks of the plan need the pipeline, which is made from the plan: filled in below.
        home = Home()
        self.schedule = schedule
        with in_words_of(schedule):
            plan = translate(schedule, stream_pool, threads, home)
            if not is_ours(self._executor):
                plan = delegated(plan, schedule, stream_pool, self._executor, home)
                kind = DelegatedPipeline
                # The effects of the tasks happen in the executor's call, and would be attributed to
                # it.
                options.setdefault("check_effects", False)
            self.plan: PipelinePlan = replace(plan, run_ahead=run_ahead)
            self.pipe: SWPipeline[IterContext] = kind(self.plan, device=device, **options)
        # A strong reference would be a cycle: the pipeline holds its tasks, and they hold ``home``.
        home.pipe = weakref.proxy(self.pipe)
        place = TaskPlace(stream_pool, home, 0)
        try:
            # Each task gets an empty context, which no batch uses afterwards.
            for task in tasks:
                task.init(TaskContext(IterContext(None, self.pipe.next_iteration), place))
        # The caller gets no pipeline to shut down, so its threads are stopped here.
        except BaseException:
            self.shutdown()
            raise

    @staticmethod
    def basic(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[[Any], Tensor] | None = None,
        prefetch: bool = False,
        memcpy_stream: bool = False,
        threaded: bool = False,
        thread_map: ThreadMap = None,
        executor: Any = None,
        device: torch.device | str | None = None,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        backward_fn: Callable[[Tensor], Any] | None = None,
        optimizer_step_fn: Callable[[], Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> SchedulablePipeline:
        """Return a pipeline that runs an ordinary training step (seed section 8.1).

        Its tasks are ``h2d``, ``zero_grad``, ``forward``, ``backward`` and ``optimizer_step``, and
        ``progress`` returns what the model returned.

        Args:
            model: The model, called with the batch.
            optimizer: The optimizer of its parameters.
            loss_fn: The loss, from what the model returns. None if the model returns the loss, a
                tuple that begins with it, or a dict with ``"loss"``.
            prefetch: Copy each batch while the previous batch is trained on. Requires that batches
                come from ``progress`` with an iterator.
            memcpy_stream: Copy on a stream of its own, "memcpy".
            threaded: Run each stream's tasks on a thread of their own, or on the threads that
                ``thread_map`` names.
            thread_map: See ``ThreadedExecutor``; requires ``threaded``.
            executor: See ``SchedulablePipeline``; excludes ``threaded``.
            device: The device that batches are copied to; None for the model's.
            forward_fn: ``forward_fn(model, batch)`` instead of ``model(batch)``: for autocast, or a
                model with several arguments.
            backward_fn: ``backward_fn(loss)`` instead of ``loss.backward()``.
            optimizer_step_fn: ``optimizer_step_fn()`` instead of ``optimizer.step()``: for clipping
                and learning rate schedules.
            options: Options of ``SchedulablePipeline``.

        Raises:
            TypeError: See ``SchedulablePipeline``.
            ValueError: ``executor`` is given with ``threaded``, or ``thread_map`` without it; see
                also ``SchedulablePipeline``.
        """
        if executor is not None and threaded:
            raise ValueError("executor and threaded=True are given: leave one of them out")
        if thread_map is not None and not threaded:
            raise ValueError("thread_map is given without threaded=True: add it")
        if device is None:
            # A model without parameters runs on the CPU.
            device = next((p.device for p in model.parameters()), "cpu")
        where = torch.device(device)
        tasks = training_tasks(
            model,
            optimizer,
            where,
            loss_fn=loss_fn,
            forward_fn=forward_fn,
            backward_fn=backward_fn,
            optimizer_step_fn=optimizer_step_fn,
            prefetch=prefetch,
            stream="memcpy" if memcpy_stream else DEFAULT,
        )
        # None for both: the caller's current stream, and a stream that swpipe makes.
        pool = StreamPool(dict.fromkeys([DEFAULT, "memcpy"] if memcpy_stream else [DEFAULT]))
        return SchedulablePipeline(
            Schedule((Stage(tasks),), pool.names),
            pool,
            executor=ThreadedExecutor(thread_map) if threaded else executor,
            device=where,
            **options,
        )

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Run one period, or as many as fill the pipeline, and return a batch's ``step_result``.

        Args:
            iterator: An iterator over the batches; pass the same one until it is exhausted.

        Returns:
            The slot ``step_result`` of the oldest batch; None if the slot is empty.

        Raises:
            StopIteration: All batches of the iterator have been returned.
            RuntimeError: The pipeline was shut down; see also ``SWPipeline.progress``.
            BaseException: The first exception that a task or the iterator raised.
        """
        with in_words_of(self.schedule):
            return _result(self.pipe.progress(iterator))

    def step(self, batch: Any) -> Any:
        """Run all tasks on one batch alone, as ``progress(iter([batch]))`` does."""
        return self.progress(iter([batch]))

    def drain(self) -> list[Any]:
        """Finish the batches in flight without a pull, and return their results, oldest first.

        Raises:
            BaseException: See ``progress``.
        """
        with in_words_of(self.schedule):
            return [_result(ctx) for ctx in self.pipe.drain()]

    def shutdown(self) -> None:
        """Stop the threads and drop the batches in flight; further calls have no effect."""
        if not self.pipe.closed:
            self.pipe.close()
            # Within the condition, so that a user-defined executor is shut down only once.
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.shutdown()


class Pipeline(SchedulablePipeline):
    """A ``SchedulablePipeline`` that runs a list of tasks in one stage.

    If no pool is given, swpipe makes the streams that the tasks name.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        stream_pool: StreamPool | None = None,
        *,
        executor: Any = None,
        device: Device | torch.device | str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        stage = Stage(tuple(tasks))
        streams = dict.fromkeys([DEFAULT, *(task.stream for task in stage.tasks)])
        super().__init__(
            Schedule((stage,), tuple(streams)),
            StreamPool(streams) if stream_pool is None else stream_pool,
            executor=executor,
            device=device,
            **options,
        )


def _result(ctx: IterContext) -> Any:
    # Not by ``getattr``, which raises for an attribute that the plan has dropped.
    return vars(ctx).get(RESULT)
