"""HSTU's pipeline: ``progress`` returns (loss, tokens, output), under a schedule with lookaheads.

Source: seed sections 5, 7.3 and 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.hstu_schedule import PREFETCH, TASKS, hstu_plan, hstu_schedule
from swpipe.tasks.torchrec.forwards import Kind
from swpipe.tasks.torchrec.named import Form, In, Out
from swpipe.tasks.torchrec.pipeline_factory import PipelineFactory
from swpipe.tasks.torchrec.recsys_examples.jagged import KEYWORDS, JaggedPipeline
from swpipe.tasks.torchrec.refused_arguments import arguments
from swpipe.tasks.torchrec.shuffle import IdentityShuffler
from swpipe.tasks.torchrec.task_options import TaskOptions
from swpipe.tasks.torchrec.task_set import SparseDistTasks


def hstu_groups(prefetch: bool) -> dict[str, Sequence[str]]:
    """The fourteen tasks, or thirteen without a prefetch, for ``TaskOptions(grouped=)``."""
    calls = {
        "h2d": ["copy"],
        PREFETCH: ["prefetch"],
        "global_tokens_allreduce": ["count_tokens"],
        "nccl_safety_barrier": [],  # only what it waits for
        "forward": [*([] if prefetch else ["prefetch"]), "embedding_forward", "dense_forward"],
        "backward": ["postprocess_loss", "dense_backward", "embedding_backward"],
        "finalize_model_grads": ["finalize_gradients"],
        "watchdog_step": ["watch"],
    }
    return {name: calls.get(name, [name]) for name in TASKS if prefetch or name != PREFETCH}


class HSTUPipeline(JaggedPipeline[In, Out]):
    """Trains a model that returns (losses, output), with one loss per token, in fourteen tasks.

    Use it as a context manager, or call ``shutdown``. Nothing runs between two calls of
    ``progress``: the model may be detached, evaluated or saved there. Sharded models run within
    torch's DDP or Megatron's wrapper; a model without sharded modules needs no process group.

    Args:
        model, optimizer, device, batch_shuffler: As for ``JaggedPipeline``.
        prefetch: With the task ``prefetch_embeddings``, for tables with a cache.
        prefetch_depth: Batches whose ids are exchanged ahead; one more is copied.
        threaded: Some tasks have threads of their own; False: the caller's thread runs all.
        thread_map: None for ``HSTU_DEFAULT_THREAD_MAP``; the name of a preset
            (``HSTU_THREAD_MAPS``), "per_task", a dict of task to thread, or a function of the task
            that returns the thread's name. In a dict, "compute" and "default" are the caller's
            thread, on which all tasks run that it does not name.
        execute_all_batches, custom_model_fwd, returns, finalize: As for ``JaggedPipeline``, and so
            are watchdog, assert_nan_loss, find, inputs, strict, random and run_ahead.

    Attributes:
        schedule: The tasks' lookaheads, streams and waits.

    Raises:
        ScheduleValidationError: ``thread_map`` names a task that there is not.
        TypeError: ``thread_map`` or the shuffler is of another kind.
        ValueError: ``prefetch_depth`` is below 1; others as for ``JaggedPipeline``.
    """

    form = Form(left=1)

    arguments = arguments(
        {},
        {
            "prefetch": False,
            "prefetch_depth": 1,
            "batch_shuffler": None,
            "threaded": True,
            "thread_map": None,
            "execute_all_batches": True,
            "custom_model_fwd": None,
            **KEYWORDS,
        },
    )

    def _take(self, given: Mapping[str, Any]) -> None:
        super()._take(given)
        self.schedule = hstu_schedule(
            prefetch=given["prefetch"],
            prefetch_depth=given["prefetch_depth"],
            shuffled=type(self._shuffler) not in (IdentityShuffler, type(None)),
        )
        self._made = hstu_plan(self.schedule, given["thread_map"], threaded=given["threaded"])

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._made

    def _options(self, kind: Kind) -> TaskOptions:
        prefetch = self._given["prefetch"]
        kind = "prefetch" if prefetch and kind != "own" else kind
        return replace(super()._options(kind), grouped=hstu_groups(prefetch))

    def shutdown(self) -> None:
        """Stop the threads, drop the batches in flight and restore the model; twice is fine."""
        self.close()


class HSTUPipelineFactory(PipelineFactory):
    """HSTU's pipelines by name: ``hstu_sparse_dist`` and ``hstu_prefetch_sparse_dist``."""


HSTUPipelineFactory.register("hstu_sparse_dist", HSTUPipeline)
HSTUPipelineFactory.register("hstu_prefetch_sparse_dist", partial(HSTUPipeline, prefetch=True))
