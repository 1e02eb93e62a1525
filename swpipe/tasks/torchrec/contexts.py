"""What one batch carries between TorchRec's stages: one context per iteration, at ``ctx.pipeline``.

TorchRec's own pipelines reuse one context (version 0) or keep a queue of them (version 1). Here
each iteration has its own, of version 1, so tasks of two iterations never share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swpipe.tasks.torchrec._torchrec import PrefetchTrainPipelineContext
from swpipe.tasks.torchrec.seam import Seam


@dataclass
class SparseDistContext(PrefetchTrainPipelineContext):  # type: ignore[misc]
    """TorchRec's context, and fields of our own. Keys are module names.

    Attributes:
        inputs: The batch's ``ExchangedInputs``.
        embeddings: Each module's embeddings, as awaitables.
        seams: The cut in the autograd graph at each module's embeddings.
    """

    inputs: Any = None
    embeddings: dict[str, Any] = field(default_factory=dict)
    seams: dict[str, Seam] = field(default_factory=dict)

    def wait_for_sizes(self) -> None:
        """Wait for the sizes; start the exchange of ids."""
        for module_names, splits in self.fused_splits_awaitables:
            requests, _ = splits.wait_with_context()
            self.input_dist_tensors_requests.update(zip(module_names, requests, strict=True))
        self.fused_splits_awaitables.clear()


def new_context(iteration: int) -> SparseDistContext:
    """An empty context for one iteration."""
    return SparseDistContext(index=iteration, version=1)
