"""Everything used of torch's runtime. Most of it is private, so the version is checked first.

``torch.distributed.pipelining`` runs a schedule by ``_PipelineScheduleRuntime``, whose methods and
rules change from release to release.
"""

from __future__ import annotations

import re
from typing import Any

import torch

TESTED = ("2.13", "2.14", "2.15")
"""The releases of torch whose runtime was tested."""


def check_torch(version: str) -> None:
    """Refuse a torch whose runtime was not tested.

    Raises:
        ImportError: It is another release.
    """
    series = re.match(r"\d+\.\d+", version)
    if series is None or series[0] not in TESTED:
        tested = ", ".join(TESTED)
        raise ImportError(
            f"torch {version} is installed, but swpipe.tasks.pipeline_parallel uses private parts "
            f"of torch.distributed.pipelining and was tested with {tested}: install one of them"
        )


check_torch(torch.__version__)

from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402

TorchAction: Any = schedules._Action
TorchRuntime: Any = schedules._PipelineScheduleRuntime
Stage: Any = PipelineStage

OPS: Any = {
    "F": schedules.FORWARD,
    "I": schedules.BACKWARD_INPUT,
    "W": schedules.BACKWARD_WEIGHT,
    "B": schedules.FULL_BACKWARD,
}
"""swpipe's op to torch's."""

BACKWARD: Any = (OPS["I"], OPS["W"], OPS["B"], schedules.REDUCE_GRAD)
"""Ops that an evaluation leaves out."""

OVERLAP: Any = schedules.OVERLAP_F_B

wait_for: Any = schedules._wait_batch_p2p
"""For sends or receives that were started."""
