"""The nodes of the published generator's result."""

from __future__ import annotations

from typing import NamedTuple


class ScheduledNode(NamedTuple):
    """One entry of a stage's list, with its times; the names are those of seed 003.

    Attributes:
        type: ``F``, ``B`` (the gradient of the input) or ``W``; ``SEND_FORWARD``, ``RECV_FORWARD``,
            ``SEND_BACKWARD``, ``RECV_BACKWARD``; ``POST_VALIDATION``, ``SEND_POST_VALIDATION``,
            ``RECV_POST_VALIDATION``.
        chunk: 0 on the way down the V, 1 on the way up: the physical chunk.
        stage: The rank, from 0.
        minibatch: The microbatch, from 0.
        start_time: In the unit of the costs.
        completion_time: In the unit of the costs; of what does not compute, the start.
        rollback: Whether a receive has to be repeated when the optimizer's step is rolled back.
    """

    type: str
    chunk: int
    stage: int
    minibatch: int
    start_time: float
    completion_time: float
    rollback: bool = False
