"""A small GPT (``swpipe.tasks.pipeline_parallel``) as a workload of the command line.

Under torchrun its layers are on the ranks, and a step runs a pipeline-parallel schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from swpipe.core.messages import plain
from swpipe.plans.pipeline_parallel import pipeline_training
from swpipe.tasks.workload import SEED, InputError, Job, Option, Workload, register

if TYPE_CHECKING:
    from swpipe.tasks.pipeline_parallel.gpt_job import GPTJobConfig


def _count(name: str, default: int, told: str, maximum: int = 2**20) -> Option:
    return Option(name, int, default, told, minimum=1, maximum=maximum)


OPTIONS = (
    _count("layers", 16, "Layers of the GPT.", 4096),
    _count("hidden_size", 64, "Features of a token.", 2**16),
    _count("heads", 4, "Attention heads; they divide the features.", 2**16),
    _count("sequence_length", 32, "Tokens of a sequence."),
    _count("global_batch_size", 16, "Sequences per step, on all ranks together."),
    _count("microbatches", 8, "Into which a step is cut."),
    Option(
        "schedule",
        str,
        "ours",
        "Of the GPT's passes, under torchrun: ours, zbv, 1f1b, interleaved, dualpipev, gpipe, "
        "looped_bfs, interleaved_zb, or a CSV file.",
    ),
    SEED,
)


def configure(options: Mapping[str, Any]) -> GPTJobConfig:
    """The job's configuration."""
    # A sum that is split among more threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        from swpipe.tasks.pipeline_parallel.gpt_job import GPTJobConfig

        return GPTJobConfig.of(options)
    except (ImportError, ValueError) as error:  # another torch; sizes that do not fit
        raise InputError(str(error)) from error


def open_job(config: GPTJobConfig) -> Job:
    """The job in one process."""
    from swpipe.tasks.pipeline_parallel.gpt_job import GPTJob

    return GPTJob(config)


def open_pipeline_job(config: GPTJobConfig) -> Job:
    """The job on all ranks of the process group.

    Raises:
        InputError: There is no such schedule.
    """
    from swpipe.plans.pipeline_parallel import ScheduleError
    from swpipe.tasks.pipeline_parallel.gpt_job import PipelineGPTJob

    try:
        return PipelineGPTJob(config)
    except ScheduleError as error:
        raise InputError(f"--schedule {plain(config.schedule)}: {error}") from error


_ONE = Workload(
    name="transformer",
    plans=pipeline_training.PLANS,
    usual_plan="ahead",
    configure=configure,
    open_job=open_job,
    options=OPTIONS,
)
register(replace(_ONE, on_ranks=replace(_ONE, open_job=open_pipeline_job)))
