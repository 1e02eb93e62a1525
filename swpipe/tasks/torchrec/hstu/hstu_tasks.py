"""The fourteen tasks of HSTU's training step: the methods of ``JaggedTasks``, dealt otherwise.

    h2d > start_shuffle > finish_shuffle         the rows of this rank, on the device
    start_input_dist > wait_input_dist           the exchange of ids
    prefetch_embeddings                          caches filled
    zero_grad
    global_tokens_allreduce                      the tokens of all ranks
    nccl_safety_barrier                          nothing: only what it waits for
    forward                                      look-up and model
    backward                                     loss per token, backward
    finalize_model_grads > optimizer_step
    watchdog_step                                a function of the user's

States are declared as in ``SparseDistTasks``. Source: seed section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from swpipe.core.context import IterContext
from swpipe.core.task import TaskFn
from swpipe.tasks.torchrec.recsys_examples.reported_losses import JaggedTasks
from swpipe.tasks.torchrec.step import TrainStep


class HSTUTasks(JaggedTasks):
    """The fourteen tasks; thirteen without a prefetch.

    Args:
        model: As for ``JaggedTasks``.
        step: The same.
        prefetch: ``prefetch_embeddings`` is a task of its own.
        watchdog: Called once for each batch, after everything else.
        options: As for ``JaggedTasks``.
    """

    def __init__(
        self,
        model: nn.Module,
        step: TrainStep,
        *,
        prefetch: bool = False,
        watchdog: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        self._prefetch = prefetch
        self._watchdog = watchdog
        super().__init__(model, step, **options)

    def parts(self) -> dict[str, tuple[TaskFn, ...]]:
        """The tasks in serial order, each with the methods that it calls."""
        own = {"prefetch_embeddings": (self.prefetch,)} if self._prefetch else {}
        ids = () if self._prefetch else (self.prefetch,)
        return {
            "h2d": (self.copy,),
            "start_shuffle": (self.start_shuffle,),
            "finish_shuffle": (self.finish_shuffle,),
            "start_input_dist": (self.start_input_dist,),
            "wait_input_dist": (self.wait_input_dist,),
            **own,
            "zero_grad": (self.zero_grad,),
            "global_tokens_allreduce": (self.count_tokens,),
            "nccl_safety_barrier": (),
            "forward": (*ids, self.embedding_forward, self.dense_forward),
            "backward": (self.postprocess_loss, self.dense_backward, self.embedding_backward),
            "finalize_model_grads": (self.finalize_gradients,),
            "optimizer_step": (self.optimizer_step,),
            "watchdog_step": (self.watch,),
        }

    def watch(self, ctx: IterContext) -> None:
        """Call the watchdog."""
        if self._watchdog is not None:
            self._watchdog()

    def _unknown(self, parts: Sequence[TaskFn]) -> bool:
        watches = self.watch in parts and self._watchdog is not None
        return watches or super()._unknown(parts)
