"""A published training step for planners: fourteen tasks with their streams and costs.

One training step of a large sequence recommender on one machine of eight GPUs, with an embedding
cache that is filled ahead. Its tasks have no functions, since planners need none.

    memcpy      h2d > start_shuffle > finish_shuffle
    data_dist      > start_input_dist > wait_input_dist
    prefetch          > prefetch_embeddings
    caller's             > forward > backward > finalize_model_grads > optimizer_step
                             > watchdog_step

``zero_grad`` and ``nccl_safety_barrier`` come before forward, ``global_tokens_allreduce`` before
backward. Across iterations, forward and ``zero_grad`` come after the previous optimizer step, and a
prefetch after the previous backward, which updates the cache. The bottleneck is the caller's
stream: its tasks take 108,380 us.

Source: the task, stream and cost tables of the schedulable pipeline for HSTU training in NVIDIA's
recsys-examples. The published time of each task is used as its device time.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import HOST, PipelinePlan, TaskSchedule
from swpipe.planning.limits import Limits
from swpipe.plans.torchrec.hstu_schedule import TASKS

__all__ = ["costs", "limits", "plan", "with_read"]

FROZEN = ("forward", "backward", "finalize_model_grads", "optimizer_step")
"""The tasks that train."""

_NCCL = ("nccl",)
_PCIE = ("pcie",)
_TABLE: dict[str, tuple[float, str | None, tuple[str, ...]]] = {
    "h2d": (300, "memcpy", _PCIE),
    "start_shuffle": (4_600, "memcpy", _NCCL),
    "finish_shuffle": (2_300, "memcpy", _NCCL),
    "start_input_dist": (8_600, "data_dist", _NCCL),
    "wait_input_dist": (400, "data_dist", _NCCL),
    "zero_grad": (90, None, ()),
    "global_tokens_allreduce": (120, None, _NCCL),
    "nccl_safety_barrier": (20, None, ()),
    "prefetch_embeddings": (1_100, "prefetch", _PCIE),
    "forward": (28_850, None, ()),
    "backward": (12_320, None, _NCCL),
    "finalize_model_grads": (290, None, _NCCL),
    "optimizer_step": (66_610, None, ()),
    "watchdog_step": (80, None, ()),
}
_CHAIN = tuple(
    name
    for name in _TABLE
    if name not in {"zero_grad", "global_tokens_allreduce", "nccl_safety_barrier"}
)
_DEPS = (
    *((later, sooner) for sooner, later in pairwise(_CHAIN)),
    ("nccl_safety_barrier", "finish_shuffle"),
    ("forward", "nccl_safety_barrier"),
    ("forward", "zero_grad"),
    ("global_tokens_allreduce", "finish_shuffle"),
    ("backward", "global_tokens_allreduce"),
)
_CARRIED = (
    ("forward", "optimizer_step"),
    ("zero_grad", "optimizer_step"),
    ("prefetch_embeddings", "backward"),
)


def plan() -> PipelinePlan:
    """Return the step as an initial plan: all tasks in one stage, on the caller's thread."""
    return PipelinePlan(
        schedule={
            name: TaskSchedule(stream=stream, globally_ordered=resources == _NCCL)
            for name, (_, stream, resources) in _TABLE.items()
        },
        deps=_DEPS,
        cross_iter_deps=_CARRIED,
    )


def with_read(slack: int = 0, *, pipelined: bool = True, **more: Any) -> PipelinePlan:
    """Return the step with a task that reads its batch, serial or with three batches in flight.

    The read, the copy and the shuffles run on the thread group "io". With ``slack`` the read has a
    group of its own, and is ``slack`` stages further ahead.
    """
    io = ("h2d", "start_shuffle", "finish_shuffle")
    ahead = dict.fromkeys(io, 2) | {"read": 2 + slack, "prefetch_embeddings": 1}
    ahead |= dict.fromkeys(("start_input_dist", "wait_input_dist"), 1)
    groups = dict.fromkeys(io, "io") | {"read": "loader" if slack else "io"}
    base = plan()
    schedule = {"read": TaskSchedule(stream=HOST), **base.schedule}
    if pipelined:
        schedule = {
            name: replace(
                entry,
                stage=ahead["read"] - ahead.get(name, 0),
                thread_group=groups.get(name, entry.thread_group),
            )
            for name, entry in schedule.items()
        }
    return replace(base, schedule=schedule, deps=(*base.deps, ("h2d", "read")), **more)


def costs(read_us: float | None = None) -> CostModel:
    """Return the published costs: device time, and the use of the communicator and the PCIe bus.

    ``read_us`` is the host time of the read.
    """
    tasks = {
        name: TaskCost(device_us=time_us, resources=resources)
        for name, (time_us, _, resources) in _TABLE.items()
    }
    if read_us is not None:
        tasks["read"] = TaskCost(host_us=read_us)
    return CostModel(tasks)


def hstu_costs() -> CostModel:
    """Return the published costs under the names of HSTU's tasks.

    The forward was measured as a whole: the look-up has no cost of its own here.
    """
    published = {**costs().tasks}
    published["dense_forward"] = published.pop("forward")
    return CostModel({name: published.get(name, TaskCost()) for name in TASKS})


def limits(in_flight: int = 5, threads: int = 4) -> Limits:
    """Return the published limits: five iterations in flight, four threads, frozen tasks."""
    return Limits(in_flight=in_flight, groups=threads, frozen=FROZEN)
