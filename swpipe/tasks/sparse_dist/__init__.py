"""The recommender's training step on TorchRec's sharded modules, as eleven tasks."""

from swpipe.tasks.sparse_dist.drop_in import PipelineFactory, SparseDistPipeline
from swpipe.tasks.sparse_dist.rewrite import RewriteError, RewriteReport
from swpipe.tasks.sparse_dist.step import TrainStep
from swpipe.tasks.sparse_dist.tasks import SparseDistTasks

__all__ = [
    "PipelineFactory",
    "RewriteError",
    "RewriteReport",
    "SparseDistPipeline",
    "SparseDistTasks",
    "TrainStep",
]
