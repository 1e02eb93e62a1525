"""HSTU: a small ranking model, and its training step as fourteen tasks with lookaheads.

Needs TorchRec. Neither recsys-examples nor Megatron is imported.
"""

from swpipe.plans.torchrec.hstu_schedule import (
    HSTU_DEFAULT_THREAD_MAP,
    HSTU_THREAD_MAPS,
    hstu_plan,
    hstu_schedule,
)
from swpipe.tasks.torchrec.hstu.hstu_pipeline import HSTUPipeline, HSTUPipelineFactory
from swpipe.tasks.torchrec.hstu.hstu_tasks import HSTUTasks
from swpipe.tasks.torchrec.hstu.ranking_model import HSTURanking, RankingConfig
from swpipe.tasks.torchrec.hstu.ratings import RatingsError, generate_ratings, read_ratings
from swpipe.tasks.torchrec.hstu.sequence_attention import HSTULayer
from swpipe.tasks.torchrec.hstu.sequence_batch import Event, SequenceBatch

__all__ = [  # noqa: RUF022
    "Event",
    "HSTULayer",
    "HSTUPipeline",
    "HSTUPipelineFactory",
    "HSTURanking",
    "HSTUTasks",
    "HSTU_DEFAULT_THREAD_MAP",
    "HSTU_THREAD_MAPS",
    "RankingConfig",
    "RatingsError",
    "SequenceBatch",
    "generate_ratings",
    "hstu_plan",
    "hstu_schedule",
    "read_ratings",
]
