"""The recommender's training step on TorchRec's sharded modules, as eleven tasks."""

from swpipe.tasks.sparse_dist.drop_in import PipelineFactory, SparseDistPipeline
from swpipe.tasks.sparse_dist.inputs import RewriteError
from swpipe.tasks.sparse_dist.released import MemoryOptions
from swpipe.tasks.sparse_dist.rewrite import RewriteReport
from swpipe.tasks.sparse_dist.shuffle import IdentityShuffler, KarmarkarKarpShuffler, Shuffler
from swpipe.tasks.sparse_dist.step import TrainStep
from swpipe.tasks.sparse_dist.task_set import SparseDistTasks
from swpipe.tasks.sparse_dist.uneven import (
    EvenData,
    RankDataError,
    UnevenDataError,
    pad_with,
    pad_with_last,
)

__all__ = [
    "EvenData",
    "IdentityShuffler",
    "KarmarkarKarpShuffler",
    "MemoryOptions",
    "PipelineFactory",
    "RankDataError",
    "RewriteError",
    "RewriteReport",
    "Shuffler",
    "SparseDistPipeline",
    "SparseDistTasks",
    "TrainStep",
    "UnevenDataError",
    "pad_with",
    "pad_with_last",
]
