"""A DLRM-style click model on click logs in the Criteo TSV format: the project's main job.

Needs the extra ``swpipe[clicks]`` and TorchRec; the README says how to install it with and without
a GPU.
"""

import os

# By default Polars and torch each use as many threads as there are cores, and would compete for
# them. One thread each is enough, since the plan runs them at the same time. The variable must be
# set before Polars is first imported; a value set by the user is kept.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

from swpipe.tasks.clicks.config import ClickConfig, ModelConfig
from swpipe.tasks.clicks.decode import MalformedRowError, RejectedRow
from swpipe.tasks.clicks.feed import Evaluation
from swpipe.tasks.clicks.job import ClickJob
from swpipe.tasks.clicks.log import BatchSpec, ClickDataError, ClickLog
from swpipe.tasks.clicks.metrics import TrainingDivergedError

__all__ = [
    "BatchSpec",
    "ClickConfig",
    "ClickDataError",
    "ClickJob",
    "ClickLog",
    "Evaluation",
    "MalformedRowError",
    "ModelConfig",
    "RejectedRow",
    "TrainingDivergedError",
]
