"""HSTU (``swpipe.tasks.torchrec.hstu``) as a workload of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from swpipe.plans.torchrec import hstu_schedule
from swpipe.tasks.workload import SEED, InputError, Option, Workload, register

if TYPE_CHECKING:
    from swpipe.tasks.torchrec.hstu.hstu_job import HSTUJob

OPTIONS = (
    Option(
        "ratings",
        list,
        None,
        "Files with lines of user item rating timestamp; none: ratings generated from a model.",
    ),
    Option("sequences", int, 32, "Histories per step and rank.", minimum=1),
    SEED,
)


def configure(options: Mapping[str, Any]) -> Any:
    """The job's configuration."""
    torch.set_num_threads(1)  # a sum that is split among more threads rounds otherwise
    try:
        from swpipe.tasks.torchrec.hstu.hstu_job import HSTUConfig
    except ImportError as error:
        raise InputError(
            f"the workload hstu needs swpipe[clicks] and TorchRec: docs/guide/install.md: {error}"
        ) from error
    return HSTUConfig(
        ratings=tuple(options["ratings"] or ()),
        sequences=options["sequences"],
        device=options["device"] or "cpu",
        seed=options["seed"],
    )


def open_job(config: Any) -> HSTUJob:
    """The job, on one rank or on all of the process group."""
    from swpipe.tasks.torchrec.hstu.hstu_job import HSTUJob

    return HSTUJob(config)


_ONE = Workload(
    name="hstu",
    plans=hstu_schedule.PLANS,
    usual_plan="default",
    configure=configure,
    open_job=open_job,
    options=OPTIONS,
)
register(replace(_ONE, on_ranks=_ONE))
