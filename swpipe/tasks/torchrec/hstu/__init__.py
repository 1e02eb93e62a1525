"""HSTU's training step as fourteen tasks with lookaheads, for any model with one loss per token.

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

__all__ = [  # noqa: RUF022
    "HSTUPipeline",
    "HSTUPipelineFactory",
    "HSTUTasks",
    "HSTU_DEFAULT_THREAD_MAP",
    "HSTU_THREAD_MAPS",
    "hstu_plan",
    "hstu_schedule",
]
