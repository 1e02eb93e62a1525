"""The steps of TorchRec's pipelines that a subclass may override, and where each is called here.

    progress                fill_pipeline             in each call, before anything else
      the pull of a batch   _next_batch
      H2DAndShuffle         enqueue_batch, which calls copy_batch_to_gpu
      EmbInputDistStart     start_sparse_data_dist
      EmbInputDistWait      wait_sparse_data_dist
      DenseBackward         _backward
      OptimStep             _optimizer_step, at the end dequeue_batch

An override gets TorchRec's arguments, and ``super()`` does what the task does without an override.
An override is also called in classes whose counterpart in TorchRec does this work in ``progress``
itself, without calling the method.
"""

from __future__ import annotations

from collections.abc import Mapping

from swpipe.core.messages import listed
from swpipe.plans.torchrec import sparse_dist as plans

# fill_pipeline and _next_batch are called by the pipeline itself, so no part calls them.
HOOKS: Mapping[str, str] = {
    "fill_pipeline": "",
    "_next_batch": "",
    "enqueue_batch": "copy",
    "copy_batch_to_gpu": "copy",
    "start_sparse_data_dist": "start_input_dist",
    "wait_sparse_data_dist": "wait_input_dist",
    "_backward": "dense_backward",
    "_optimizer_step": "optimizer_step",
    "dequeue_batch": "watch",
}
"""Overridable method to the part of the tasks that calls it (``TaskOptions.functions``), or ""."""

NO_HOOKS: Mapping[str, str] = {
    "_copy_batch_to_gpu": plans.COPY,
    "_wait_for_batch": plans.COPY,
    "inplace_copy_batch_to_gpu": plans.COPY,
    "_init_pipelined_modules": plans.START,
    "_pipeline_model": plans.START,
    "_start_sparse_data_dist": plans.START,
    "extract_model_input_from_batch": plans.START,
    "_wait_sparse_data_dist": plans.WAIT,
    "_prefetch": plans.PREFETCH,
    "clear_sparse_data_dist_inputs": plans.PREFETCH,
    "start_embedding_lookup": plans.EMBED,
    "wait_embedding_lookup": plans.EMBED,
    "_mlp_forward": plans.DENSE,
    "embedding_backward": plans.EMBED_BACK,
    "sync_embeddings": plans.EMBED_BACK,
    "_mlp_optimizer_step": plans.STEP,
}
"""Methods of TorchRec that are never called here, each with the task that does its work."""


def refuse_overrides(kind: type, original: type) -> None:
    """Raise TypeError if a subclass overrides a method of TorchRec's that is never called here.

    Methods of the subclass's mixins count as its own.
    """
    # The classes of the resolution order before swpipe's first one are the user's: the subclass
    # itself and its mixins.
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("swpipe."))
    own = {name for base in kind.__mro__[: kind.__mro__.index(ours)] for name in vars(base)}
    ignored = [
        name
        for name in sorted(own)
        if not name.startswith("__")
        and callable(getattr(kind, name))
        # Methods that our class has too are not reported. sync_embeddings is the
        # exception: our class inherits it from TorchRec's base class, and nothing calls it.
        and (name == "sync_embeddings" or (hasattr(original, name) and not hasattr(ours, name)))
    ]
    if ignored:
        tasks = [f"{name} to {NO_HOOKS[name]!r}" for name in ignored if name in NO_HOOKS]
        give = f", such as {listed(tasks)}" if tasks else ""
        raise TypeError(
            f"{kind.__name__} overrides {', '.join(ignored)} of TorchRec's {original.__name__}, "
            "which are not called here: give what they do to a task, in a subclass of "
            f"swpipe.tasks.torchrec.SparseDistTasks{give}; or keep TorchRec's class. Overrides of "
            f"{', '.join(HOOKS)} are called"
        )
