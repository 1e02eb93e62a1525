"""A small GPT (``swpipe.tasks.pipeline_parallel``) as a workload of the command line.

Under torchrun its layers are on the ranks, and a step runs a pipeline-parallel schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from swpipe.core.messages import plain
from swpipe.core.plan import PipelinePlan
from swpipe.plans.pipeline_parallel import pipeline_training
from swpipe.tasks.workload import SEED, InputError, Option, Training, Workload, register

if TYPE_CHECKING:
    from swpipe.tasks.pipeline_parallel.gpt_job import GPTJob, GPTJobConfig
    from swpipe.tasks.pipeline_parallel.gpt_run import GPTRun

OPTIONS = (
    Option("layers", int, 16, "Layers of the GPT.", minimum=1, maximum=4096),
    Option("hidden_size", int, 64, "Features of a token.", minimum=1, maximum=2**16),
    Option("heads", int, 4, "Attention heads; they divide the features.", minimum=1, maximum=2**16),
    Option("sequence_length", int, 32, "Tokens of a sequence.", minimum=1, maximum=2**20),
    Option(
        "global_batch_size",
        int,
        16,
        "Sequences per step, on all ranks together.",
        minimum=1,
        maximum=2**20,
    ),
    Option("microbatches", int, 8, "Into which a step is cut.", minimum=1, maximum=2**20),
    Option(
        "schedule",
        str,
        "ours",
        "Of the GPT's passes, under torchrun: ours, zbv, 1f1b, interleaved, dualpipev, or a CSV "
        "file.",
    ),
    SEED,
)

_TOKENS = 101  # different ones; a prime, so that the generated text has long cycles


def configure(options: Mapping[str, Any]) -> GPTJobConfig:
    """The job's configuration."""
    # A sum that is split among more threads rounds otherwise.
    torch.set_num_threads(1)
    try:
        from swpipe.tasks.pipeline_parallel.gpt_job import GPTJobConfig
        from swpipe.tasks.transformer import TransformerConfig
    except ImportError as error:  # another torch
        raise InputError(str(error)) from error
    try:
        model = TransformerConfig(
            num_layers=options["layers"],
            hidden_size=options["hidden_size"],
            num_attention_heads=options["heads"],
            vocab_size=_TOKENS,
            max_sequence_length=options["sequence_length"],
            seed=options["seed"],
        )
        return GPTJobConfig(
            model,
            sequences=options["global_batch_size"],
            n_micro=options["microbatches"],
            schedule=options["schedule"],
            device=options["device"] or "cpu",
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def open_job(config: GPTJobConfig) -> GPTJob:
    """The job in one process."""
    from swpipe.tasks.pipeline_parallel.gpt_job import GPTJob

    return GPTJob(config)


def open_pipeline_job(config: GPTJobConfig) -> GPTJob:
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


def _training(open_one: Callable[[Any], GPTJob]) -> Training:
    def open_run(name: str, config: Any, plan: PipelinePlan, steps: int | None) -> GPTRun:
        from swpipe.tasks.pipeline_parallel.gpt_run import GPTRun

        return GPTRun(name, config, plan, steps, open_one)

    return Training(open_run, report)


def report(runs: Sequence[GPTRun]) -> str:
    """Speed, losses and a digest of the parameters of each run."""
    from swpipe.tasks.pipeline_parallel import gpt_run

    return gpt_run.report(runs)


_ONE = Workload(
    name="transformer",
    plans=pipeline_training.PLANS,
    usual_plan="ahead",
    configure=configure,
    open_job=open_job,
    options=OPTIONS,
    training=_training(open_job),
)
register(
    replace(
        _ONE,
        on_ranks=replace(_ONE, open_job=open_pipeline_job, training=_training(open_pipeline_job)),
    )
)
