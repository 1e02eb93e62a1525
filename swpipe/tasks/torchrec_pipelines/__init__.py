"""TorchRec's pipelines by their names and arguments, run by swpipe.

    from swpipe.tasks.torchrec_pipelines import TrainPipelineSparseDist

in place of ``from torchrec.distributed.train_pipeline import TrainPipelineSparseDist``. Arguments
that have no counterpart are refused unless at their default, with the reason; classes that have
none say at their construction what to use instead. Other names of TorchRec's package, such as
``GradientAccumulationWrapper``, are TorchRec's own here.
"""

from typing import Any

from torchrec.distributed import train_pipeline as _theirs

from swpipe.tasks.sparse_dist._torchrec import PipelineStage
from swpipe.tasks.torchrec_pipelines.elsewhere import CLASSES as _ELSEWHERE
from swpipe.tasks.torchrec_pipelines.semi_sync import TrainPipelineSemiSync
from swpipe.tasks.torchrec_pipelines.sparse_dist import (
    EvalPipelineFusedSparseDist,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainEvalHybridPipelineBase,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
    TrainPipelineSparseDistT,
)
from swpipe.tasks.torchrec_pipelines.staged import SparseDataDistUtil, StagedTrainPipeline

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TrainEvalHybridPipelineBase",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistT",
]


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if not name.startswith("__") and hasattr(_theirs, name):
        return getattr(_theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has TorchRec's")
