"""TorchRec's pipelines without a counterpart: their construction says what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from swpipe.tasks.torchrec._torchrec import torchrec_class, torchrec_pipelines

_SAME = "has the same numbers; keep TorchRec's class where memory does not suffice"

INSTEAD = {
    "EvalPipelineCPUSparse": "it looks tables up on the CPU for a dense part on a GPU: shard the "
    "tables on the GPU and use EvalPipelineSparseDist, or keep TorchRec's class",
    "TrainPipelinePEC": "it looks up ahead those rows that the batch before does not update, and "
    "needs collections of its own: TrainPipelineFusedSparseDist is exact with any collection",
    "TrainPipelinePT2": "it compiles the model in its fourth batch and overlaps nothing: call "
    "model.compile() yourself, and use TrainPipelineBase, which copies batches ahead",
    "TrainPipelinePrefetchEMS": "it frees tables' caches during the dense part: "
    f"PrefetchTrainPipelineSparseDist {_SAME}",
    "TrainPipelineSparseDistBwdOpt": "it steps the optimizer within backward, with the gradients "
    "that are there by then: TrainPipelineFusedSparseDist steps with all of them, while the next "
    "batch's embeddings are exchanged, where the optimizer has no tables",
    "TrainPipelineSparseDistCompAutograd": "it compiles backward: call progress() of "
    "TrainPipelineSparseDist under torch._dynamo.compiled_autograd, or keep TorchRec's class",
    "TrainPipelineSparseDistEmbStash": "it moves tables to the host during the dense part: "
    f"TrainPipelineSparseDist {_SAME}",
    "TrainPipelineSparseDistOptStash": "it moves the optimizer's state to the host between steps: "
    f"TrainPipelineSparseDist {_SAME}",
}
"""Class to what it does, and what to use."""


class Elsewhere(torchrec_pipelines.TrainPipeline):  # type: ignore[misc]
    """Base of the classes in ``INSTEAD``.

    Raises:
        NotImplementedError: Always, when it is constructed.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise NotImplementedError(f"{name} has no counterpart in swpipe: {INSTEAD[name]}")

    def progress(self, dataloader_iter: Any) -> NoReturn:
        """There is no instance to call this of."""
        raise NotImplementedError


def _made(name: str, instead: str) -> type[Elsewhere]:
    said = f"Raises NotImplementedError when it is constructed: {instead}."
    kind = type(name, (Elsewhere,), {"__doc__": said, "__module__": __name__})
    if (original := torchrec_class(name)) is not None:
        original.register(kind)
    return kind


CLASSES = {name: _made(name, instead) for name, instead in INSTEAD.items()}
