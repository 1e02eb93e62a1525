"""HSTU's pipeline: ``progress`` returns (loss, tokens, output), under a schedule with lookaheads.

    pipe = HSTUPipelineFactory.create(
        "hstu_prefetch_sparse_dist", model=model, optimizer=optimizer, device=device
    )
    batches = iter(loader)
    while True:
        try:
            loss, tokens, output = pipe.progress(batches)
        except StopIteration:
            break
    pipe.shutdown()

Source: seed sections 5, 7.3 and 8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.hstu_schedule import ThreadMap, hstu_plan, hstu_schedule
from swpipe.tasks.torchrec.forwards import Kind
from swpipe.tasks.torchrec.hstu.hstu_tasks import HSTUTasks
from swpipe.tasks.torchrec.named import Form, In, Out
from swpipe.tasks.torchrec.pipeline_factory import PipelineFactory
from swpipe.tasks.torchrec.recsys_examples.jagged import JaggedPipeline
from swpipe.tasks.torchrec.shuffle import IdentityShuffler
from swpipe.tasks.torchrec.step import TrainStep
from swpipe.tasks.torchrec.task_set import SparseDistTasks


class HSTUPipeline(JaggedPipeline[In, Out]):
    """Trains a model that returns (losses, output), with one loss per token, in fourteen tasks.

    Use it as a context manager, or call ``shutdown``. Nothing runs between two calls of
    ``progress``: the model may be detached, evaluated or saved there. Sharded models run within
    torch's DDP or Megatron's wrapper; a model without sharded modules needs no process group.

    Args:
        model: As for ``JaggedPipeline``.
        optimizer: Of the dense parameters.
        device: Where the batches go.
        prefetch: With the task ``prefetch_embeddings``, for tables with a cache.
        prefetch_depth: Batches whose ids are exchanged ahead; one more is copied.
        batch_shuffler: As for ``JaggedPipeline``.
        threaded: Some tasks have threads of their own; False: the caller's thread runs all.
        thread_map: None for ``HSTU_DEFAULT_THREAD_MAP``; the name of a preset
            (``HSTU_THREAD_MAPS``), "per_task", a dict of task to thread, or a function of the task
            that returns the thread's name. In a dict, "compute" and "default" are the caller's
            thread, on which all tasks run that it does not name.
        watchdog: Called once for each batch, after everything else.
        options: Of ``JaggedPipeline``: ``custom_model_fwd``, ``execute_all_batches``, ``finalize``,
            ``find``, ``inputs``, ``random``, ``returns``, ``run_ahead`` and ``strict``.

    Attributes:
        schedule: The tasks' lookaheads, streams and waits.

    Raises:
        ScheduleValidationError: ``thread_map`` names a task that there is not.
        TypeError: ``thread_map`` or the shuffler is of another kind.
        ValueError: ``prefetch_depth`` is below 1; others as for ``JaggedPipeline``.
    """

    _tasks_class = HSTUTasks
    _takes = JaggedPipeline._takes | {"prefetch", "watchdog"}
    form = Form(left=1)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        prefetch: bool = False,
        prefetch_depth: int = 1,
        batch_shuffler: Any = None,
        threaded: bool = True,
        thread_map: ThreadMap = None,
        watchdog: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        self._prefetch = prefetch
        self.schedule = hstu_schedule(
            prefetch=prefetch,
            prefetch_depth=prefetch_depth,
            shuffled=not (batch_shuffler is None or isinstance(batch_shuffler, IdentityShuffler)),
        )
        self._made = hstu_plan(self.schedule, thread_map, threaded=threaded)
        super().__init__(
            model,
            optimizer,
            device,
            batch_shuffler=batch_shuffler,
            prefetch=prefetch,
            watchdog=watchdog,
            **options,
        )

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._made

    def _tasks_for(self, step: TrainStep, kind: Kind) -> SparseDistTasks:
        return super()._tasks_for(step, "prefetch" if self._prefetch and kind != "own" else kind)

    def shutdown(self) -> None:
        """Stop the threads, drop the batches in flight and restore the model; twice is fine."""
        self.close()


class HSTUPipelineFactory(PipelineFactory):
    """A registry of HSTU's pipelines by name: ``hstu_sparse_dist``, ``hstu_prefetch_sparse_dist``.

    ``create(name, ...)`` takes the arguments of ``HSTUPipeline``.
    """


HSTUPipelineFactory.register("hstu_sparse_dist", HSTUPipeline)
HSTUPipelineFactory.register("hstu_prefetch_sparse_dist", partial(HSTUPipeline, prefetch=True))
