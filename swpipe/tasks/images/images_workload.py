"""The image model (``swpipe.tasks.images``) as a workload of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks.images.image_job import ImageConfig, ImageJob
from swpipe.tasks.job_run import training_of
from swpipe.tasks.workload import SEED, Workload, register

AHEAD, LAST = ("decode", "augment"), ("forward", "backward", "step")


def configure(options: Mapping[str, Any]) -> ImageConfig:
    """The job's configuration."""
    # The plan uses the other cores; and a sum that is split among more threads rounds otherwise.
    torch.set_num_threads(1)
    return ImageConfig(seed=options["seed"], device=options["device"] or "cpu")


register(
    Workload(
        name="images",
        plans={
            "serial": lambda: PipelinePlan.serial([*AHEAD, *LAST]),
            "pipelined": lambda: prefetch_plan(AHEAD, LAST, carried=[("forward", "step")]),
        },
        usual_plan="pipelined",
        configure=configure,
        open_job=ImageJob,
        options=(SEED,),
        training=training_of(ImageJob),
    )
)
