"""What one batch carries between TorchRec's stages: one context per iteration, never shared.

TorchRec's own pipelines hand one context object from batch to batch (their version 0) or keep a
queue of them (version 1). Here each iteration has its own, of version 1, at ``ctx.pipeline``. Tasks
of two iterations so never touch the same one, whatever the plan, and the fields that carry the
state of a batch over to the next one stay empty.

Who writes and who reads each field stands in ``FIELDS``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swpipe.tasks.sparse_dist._torchrec import PrefetchTrainPipelineContext
from swpipe.tasks.sparse_dist.seam import Seam


@dataclass
class SparseDistContext(PrefetchTrainPipelineContext):  # type: ignore[misc]
    """TorchRec's context, and two fields for the split forward. Keys are module names.

    Attributes:
        embeddings: Each module's embeddings, as awaitables.
        seams: Where the graph is cut through each module's embeddings.
    """

    embeddings: dict[str, Any] = field(default_factory=dict)
    seams: dict[str, Seam] = field(default_factory=dict)


def new_context(iteration: int) -> SparseDistContext:
    """An empty context for one iteration."""
    return SparseDistContext(index=iteration, version=1)


class FieldUse(NamedTuple):
    """How a field of the context is used.

    Attributes:
        field: Its name.
        holds: What it holds.
        writer: The task that fills it.
        reader: The task that takes it out, under the split forward; the prefetching forward reads
            where it says EmbForward, the pipelined one reads what it says EmbPrefetch reads there.
    """

    field: str
    holds: str
    writer: str
    reader: str


FIELDS = (
    FieldUse(
        "input_dist_splits_requests",
        "handles of the exchange of sizes, one per module",
        "EmbInputDistStart",
        "EmbInputDistWait",
    ),
    FieldUse(
        "fused_splits_awaitables",
        "the same, fused per process group",
        "EmbInputDistStart",
        "EmbInputDistWait",
    ),
    FieldUse(
        "module_contexts",
        "what each module remembers of its sharding, from input to output",
        "EmbInputDistStart",
        "EmbPrefetch",
    ),
    FieldUse(
        "input_dist_tensors_requests",
        "handles of the exchange of ids, one per module",
        "EmbInputDistWait",
        "EmbPrefetch",
    ),
    FieldUse(
        "module_input_post_prefetch", "ids that belong to this rank", "EmbPrefetch", "EmbForward"
    ),
    FieldUse(
        "module_contexts_post_prefetch",
        "what was in module_contexts",
        "EmbPrefetch",
        "EmbForward",
    ),
    FieldUse("embeddings", "handles of the exchange of embeddings", "EmbForward", "DenseForward"),
    FieldUse("seams", "embeddings and their gradients", "DenseForward", "EmbBackward"),
)
"""Every field that is used. ``events``, ``postproc_fwd_results`` and all fields whose names end in
``_next_batch`` stay empty; ``index`` and ``version`` are set when the context is made."""
