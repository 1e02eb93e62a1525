"""HSTU's pipeline: ``progress`` returns (loss, tokens, output), under a schedule with lookaheads.

Source: seed sections 5, 7.3 and 8.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.hstu_config import hstu_config
from swpipe.plans.torchrec.hstu_schedule import PREFETCH, TASKS, hstu_plan, hstu_schedule
from swpipe.tasks.torchrec.pipelines.named import In, Out
from swpipe.tasks.torchrec.pipelines.pipeline_factory import PipelineFactory
from swpipe.tasks.torchrec.pipelines.refused_arguments import arguments
from swpipe.tasks.torchrec.recsys_examples.jagged import KEYWORDS, JaggedPipeline
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from swpipe.tasks.torchrec.shuffling.shuffle import IdentityShuffler
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks


def hstu_groups(prefetch: bool, *, split: bool = True) -> dict[str, Sequence[str]]:
    """Return the tasks and the methods that they call, for ``TaskOptions(grouped=)``.

    Args:
        prefetch: True for fifteen tasks, with ``prefetch_embeddings``; False for fourteen.
        split: Whether ``compute_output_dist`` looks up; otherwise ``dense_forward`` is the whole
            forward.
    """
    # Without a task of its own, the prefetch is the first part of the look-up.
    look_up = [*([] if prefetch else ["prefetch"]), "embedding_forward"]
    # Tasks that are not listed call the method of their own name.
    calls = {
        "h2d": ["copy"],
        PREFETCH: ["prefetch"],
        "global_tokens_allreduce": ["count_tokens"],
        # The barrier runs nothing, and only adds the order of the tasks that it waits for.
        "nccl_safety_barrier": [],
        "compute_output_dist": look_up if split else [],
        "dense_forward": ["dense_forward"] if split else [*look_up, "dense_forward"],
        "backward": ["postprocess_loss", "dense_backward", "embedding_backward"],
        "finalize_model_grads": ["finalize_gradients"],
        "watchdog_step": ["watch"],
    }
    return {name: calls.get(name, [name]) for name in TASKS if prefetch or name != PREFETCH}


class HSTUPipeline(JaggedPipeline[In, Out]):
    """A pipeline in fifteen tasks for models that return (losses, output), one loss per token.

    Use it as a context manager, or call ``shutdown``. Nothing runs between two calls of
    ``progress``, so the model may be detached, evaluated or saved there. Sharded models run within
    torch's DDP or Megatron's wrapper; a model without sharded modules needs no process group.

    Args:
        model, optimizer, device, batch_shuffler: As for ``JaggedPipeline``.
        prefetch: Whether there is the task ``prefetch_embeddings``, for tables with a cache.
        prefetch_depth: Number of batches whose ids are exchanged ahead; one more is copied.
        threaded: Whether some tasks have threads of their own; if False, the caller's thread runs
            all.
        thread_map: None for ``HSTU_DEFAULT_THREAD_MAP``; the name of a preset
            (``HSTU_THREAD_MAPS``), "per_task", a dict of task to thread, or a function from the
            task to the thread's name. In a dict, "compute" and "default" are the caller's thread,
            which also runs all tasks that the dict does not name.
        schedule_config: Changed lookaheads, waits and threads of the tasks, as a mapping, as JSON
            or as the path of a JSON file (``swpipe.plans.torchrec.hstu_config``); None for the
            value of the environment variable ``HSTU_PIPELINE_CONFIG``.
        pipeline_postproc: Accepted for compatibility; it has no effect.
        execute_all_batches, custom_model_fwd, returns, finalize: As for ``JaggedPipeline``, like
        watchdog, assert_nan_loss, find, inputs, strict, random and run_ahead.

    Attributes:
        schedule: The tasks' lookaheads, streams and waits.

    Raises:
        ScheduleValidationError: ``thread_map`` names an unknown task.
        TypeError: ``thread_map`` or the shuffler has the wrong type.
        ValueError: ``prefetch_depth`` is below 1, ``schedule_config`` is wrong, or both it and
            ``thread_map`` give threads; others as for ``JaggedPipeline``.
    """

    _kind = "ahead"
    _left = 1

    arguments = arguments(
        {},
        {
            "prefetch": False,
            "prefetch_depth": 1,
            "batch_shuffler": None,
            "threaded": True,
            "thread_map": None,
            "schedule_config": None,
            "pipeline_postproc": True,
            "execute_all_batches": True,
            "custom_model_fwd": None,
            **KEYWORDS,
        },
    )

    def _take(self) -> None:
        super()._take()
        given = self._given
        # The plan is made with the arguments, before the model is rewritten, so that an error in
        # them leaves the model as it was.
        config = hstu_config(given["schedule_config"], TASKS)
        self.schedule = hstu_schedule(
            prefetch=given["prefetch"],
            prefetch_depth=given["prefetch_depth"],
            # A shuffler that exchanges nothing launches no collective, so its tasks need no global
            # order.
            shuffled=type(self._shuffler) not in (IdentityShuffler, type(None)),
            changes=config.fields,
        )
        thread_map = given["thread_map"]
        if config.thread_map is not None:
            if thread_map is not None:
                raise ValueError(
                    "thread_map is given, and the schedule configuration has one: keep one of them"
                )
            thread_map = config.thread_map
        self._made = hstu_plan(self.schedule, thread_map, threaded=given["threaded"])

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._made

    def _options(self, kind: Kind) -> TaskOptions:
        # "own": no sharded module, so the model's whole forward is one task.
        grouped = hstu_groups(self._given["prefetch"], split=kind != "own")
        return replace(super()._options(kind), grouped=grouped)

    def shutdown(self) -> None:
        """Stop the threads, drop the batches in flight and restore the model; idempotent."""
        self.close()


class HSTUPipelineFactory(PipelineFactory):
    """A factory of HSTU's pipelines: ``hstu_sparse_dist`` and ``hstu_prefetch_sparse_dist``."""


HSTUPipelineFactory.register("hstu_sparse_dist", HSTUPipeline)
HSTUPipelineFactory.register("hstu_prefetch_sparse_dist", partial(HSTUPipeline, prefetch=True))
