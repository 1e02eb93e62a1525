"""A recommender's training step on TorchRec's sharded modules, divided into eleven tasks.

TorchRec's own train pipelines are available under their names and with their arguments::

    from swpipe.tasks.torchrec import TrainPipelineSparseDist

replaces ``from torchrec.distributed.train_pipeline import TrainPipelineSparseDist``. An argument
without a counterpart in swpipe is refused, with the reason, unless it has its default value. A
class without a counterpart raises at construction and names an alternative. All other names of
TorchRec's package, such as ``GradientAccumulationWrapper``, are TorchRec's own objects.
"""

from typing import Any

from swpipe.tasks.torchrec._torchrec import PipelineStage, train_pipeline
from swpipe.tasks.torchrec.embedding_tables.released import MemoryOptions
from swpipe.tasks.torchrec.pipelines.drop_in import SparseDistPipeline
from swpipe.tasks.torchrec.pipelines.named import (
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
from swpipe.tasks.torchrec.pipelines.pec_pipeline import TrainPipelinePEC
from swpipe.tasks.torchrec.pipelines.pipeline_factory import PipelineFactory
from swpipe.tasks.torchrec.pipelines.refused_arguments import ELSEWHERE
from swpipe.tasks.torchrec.pipelines.semi_sync import TrainPipelineSemiSync
from swpipe.tasks.torchrec.pipelines.staged import SparseDataDistUtil, StagedTrainPipeline
from swpipe.tasks.torchrec.pipelines.stashed import (
    TrainPipelinePrefetchEMS,
    TrainPipelineSparseDistEmbStash,
    TrainPipelineSparseDistOptStash,
)
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError
from swpipe.tasks.torchrec.rewriting.rewrite import RewriteReport
from swpipe.tasks.torchrec.shuffling.shuffle import (
    IdentityShuffler,
    KarmarkarKarpShuffler,
    Shuffler,
)
from swpipe.tasks.torchrec.step.per_token import PerToken
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
from swpipe.tasks.torchrec.step.train_step import TrainStep

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "IdentityShuffler",
    "KarmarkarKarpShuffler",
    "MemoryOptions",
    "PerToken",
    "PipelineFactory",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "RewriteError",
    "RewriteReport",
    "Shuffler",
    "SparseDataDistUtil",
    "SparseDistPipeline",
    "SparseDistTasks",
    "StagedTrainPipeline",
    "TaskOptions",
    "TrainEvalHybridPipelineBase",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePEC",
    "TrainPipelinePrefetchEMS",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistEmbStash",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistOptStash",
    "TrainPipelineSparseDistT",
    "TrainStep",
]


def __getattr__(name: str) -> Any:
    """Return TorchRec's object of a name that is not in this package."""
    # Refused classes hide TorchRec's, so that a script learns what to use instead.
    known = {**vars(train_pipeline), **ELSEWHERE}
    if name in known:
        return known[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has TorchRec's")
