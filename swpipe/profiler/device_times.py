"""How long the work that tasks queue takes on its streams.

The time between two events, before and after the work that the task queued on its stream. If the
host queues work more slowly than the device executes it, this includes idle time of the device: it
is then close to the host time and higher than the time the device is busy.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from swpipe.profiler.measure import WindowTimer


def device_times_s(timer: WindowTimer) -> dict[str, float]:
    """Task to seconds per iteration, from the stream spans of a trace of one window.

    Empty if the device has no streams, or its events have no timing.
    """
    if not timer.pipe.device.has_streams:
        return {}
    first = timer.pipe.next_iteration + timer.num_warmup
    with timer.pipe.trace() as trace:
        timer.window()
    runs: dict[str, list[int]] = defaultdict(list)
    for span in trace.spans:
        if span.row.kind == "stream" and span.iteration >= first:
            runs[span.task].append(span.duration_ns)
    return {name: fmean(of) / 1e9 for name, of in runs.items()}
