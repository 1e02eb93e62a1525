"""TorchRec's pipelines by their names and arguments, run by swpipe.

    from swpipe.tasks.torchrec_pipelines import TrainPipelineSparseDist

in place of ``from torchrec.distributed.train_pipeline import TrainPipelineSparseDist``. Arguments
that have no counterpart are refused unless at their default, with the reason.
"""

from swpipe.tasks.sparse_dist._torchrec import PipelineStage
from swpipe.tasks.torchrec_pipelines.semi_sync import TrainPipelineSemiSync
from swpipe.tasks.torchrec_pipelines.sparse_dist import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainEvalHybridPipelineBase,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from swpipe.tasks.torchrec_pipelines.staged import SparseDataDistUtil, StagedTrainPipeline

__all__ = [
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
]
