"""Findings from the environment and torch's settings, before anything runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.core.plan import PipelinePlan, streams_of
from swpipe.device import Device
from swpipe.reporting.finding import Finding

_MOST_SWITCH_S = 0.02  # seconds; four times Python's default
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_CUDAS_CONNECTIONS = 8  # CUDA's default

_SPINS = "OpenMP's threads spin while they wait, and take the cores of other threads"
_BLOCKING = (
    ("CUDA_LAUNCH_BLOCKING", "1", True, "the host waits for every kernel: nothing overlaps"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", True, "the host waits for each collective to end"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True, "each freed tensor waits for the device"),
    ("OMP_WAIT_POLICY", "active", False, _SPINS),
    ("KMP_BLOCKTIME", "infinite", False, _SPINS),
)
"""Variables, the value that is a fault, whether only for a device with streams, and the reason."""


def environment_findings(
    device: Device, plan: PipelinePlan | None, workers: int
) -> Iterator[Finding]:
    """Yield the findings that can be made without running the loop.

    Args:
        device: The device of the tasks.
        plan: The plan that the loop runs under; None if it is not known.
        workers: The number of the loader's worker processes.
    """
    yield from _thread_findings(plan, workers)
    for name, bad, on_streams, text in _BLOCKING:
        # OpenMP's values are not case-sensitive, so neither is the comparison.
        value = os.environ.get(name, "")
        if value.strip().lower() == bad and (device.has_streams or not on_streams):
            yield Finding("blocking-setting", f"{name}={value}", text, "unset it")
    if torch.is_anomaly_enabled():
        text = "each operator keeps its stack, and the host reads all gradients to look for NaN"
        fix = "torch.autograd.set_detect_anomaly(False)"
        yield Finding("blocking-setting", "anomaly detection", text, fix)
    if (interval_s := sys.getswitchinterval()) > _MOST_SWITCH_S:
        text = "a thread that runs Python keeps all others waiting for that time"
        place = f"switch interval of {interval_s:g} s"
        yield Finding("blocking-setting", place, text, "sys.setswitchinterval(0.005)")
    if device.has_streams:
        yield from _connection_findings(plan)


def _thread_findings(plan: PipelinePlan | None, workers: int) -> Iterator[Finding]:
    ranks = ranks_on_machine()
    there_are = cores()
    # The caller's thread is one of the groups, but it exists without a plan as well.
    groups = 0 if plan is None else len(plan.thread_groups) - 1
    intra_op = torch.get_num_threads()
    each = f", on each of {ranks} ranks," if ranks > 1 else ""
    rows = (
        ("torch's intra-op threads", intra_op, "torch.set_num_threads, or OMP_NUM_THREADS"),
        ("loader", workers, "DataLoader(num_workers=)"),
        ("plan", groups + 1 if groups else 0, "fewer thread groups"),
    )
    too_many = [row for row in rows if row[1] * ranks > there_are]
    for place, number, fix in too_many:
        text = f"{number} threads or processes{each} run on {there_are} cores, and take turns"
        yield Finding("threads", place, text, f"{fix}: {max(1, there_are // ranks)} at most")
    # No single number is too high, but together they may be. Twice the cores is the limit, since
    # these threads are not all busy at once.
    if not too_many and (intra_op + workers + groups) * ranks > 2 * there_are:
        text = (
            f"{intra_op} intra-op threads, {workers} loader workers and {groups} more thread "
            f"groups{each} run on {there_are} cores, and take turns"
        )
        fix = "torch.set_num_threads(fewer): what overlaps needs cores of its own"
        yield Finding("threads", "machine", text, fix)


def _connection_findings(plan: PipelinePlan | None) -> Iterator[Finding]:
    given = os.environ.get(_CONNECTIONS, "")
    # CUDA maps streams to a fixed number of hardware queues; streams that share one wait for each
    # other.
    connections = int(given) if given.isdecimal() else _CUDAS_CONNECTIONS
    named = {} if plan is None else streams_of(plan.schedule.values())
    streams = max(2, len(named) + 1)  # at least a copy beside the caller's stream
    if connections < streams:
        text = (
            f"{connections} queues to the device for {streams} streams: work of one stream waits "
            "behind that of another"
        )
        fix = f"{_CONNECTIONS}={min(32, max(streams, _CUDAS_CONNECTIONS))}, before CUDA starts"
        yield Finding("connections", f"{_CONNECTIONS}={connections}", text, fix)
