"""HSTU's training step as fifteen tasks with lookaheads, for any model with one loss per token.

It needs TorchRec. Neither recsys-examples nor Megatron is imported.
"""

from swpipe.plans.torchrec.hstu_schedule import (
    HSTU_DEFAULT_THREAD_MAP,
    HSTU_THREAD_MAP_PRESETS,
    HSTU_THREAD_MAPS,
    hstu_plan,
    hstu_schedule,
)
from swpipe.tasks.torchrec.hstu.hstu_pipeline import HSTUPipeline, HSTUPipelineFactory, hstu_groups

__all__ = [  # noqa: RUF022
    "HSTUPipeline",
    "HSTUPipelineFactory",
    "HSTU_DEFAULT_THREAD_MAP",
    "HSTU_THREAD_MAPS",
    "HSTU_THREAD_MAP_PRESETS",
    "hstu_groups",
    "hstu_plan",
    "hstu_schedule",
]
