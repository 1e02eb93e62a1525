"""Who is told of tasks that run: NVTX on a GPU, a torch profiler while one is on, a trace while one records."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch.autograd import profiler

from swpipe.program import Instruction

if TYPE_CHECKING:
    from swpipe.steps import Observer
    from swpipe.trace import Trace


class NvtxRanges:
    """A range per task, with the iteration as its payload."""

    def __init__(self) -> None:
        import nvtx

        self._nvtx = nvtx.get_domain("swpipe")
        self._attributes: dict[str, object] = {}

    def arrive(self, ins: Instruction, iteration: int) -> None:
        return None

    def start(self, ins: Instruction, iteration: int) -> None:
        attributes = self._nvtx.get_event_attributes(message=ins.task, payload=iteration)
        self._nvtx.push_range(attributes)

    def stop(self, ins: Instruction, iteration: int) -> None:
        self._nvtx.pop_range()


class ProfilerRanges:
    """A ``record_function`` per task: about 10 us each, so only while a torch profiler is on."""

    def __init__(self) -> None:
        self._open = threading.local()

    def arrive(self, ins: Instruction, iteration: int) -> None:
        return None

    def start(self, ins: Instruction, iteration: int) -> None:
        block = profiler.record_function(f"{ins.task} [{iteration}]")
        block.__enter__()
        self._open.block = block

    def stop(self, ins: Instruction, iteration: int) -> None:
        block = self._open.__dict__.pop("block", None)
        if block is not None:
            block.__exit__(None, None, None)


_profiler_ranges = ProfilerRanges()
_nvtx_ranges: NvtxRanges | None = None


def active_observers(device_type: str, trace: Trace | None) -> tuple[Observer, ...]:
    """Whoever is to be told now; usually nobody, and then an empty tuple."""
    if device_type == "cpu" and trace is None and not profiler._is_profiler_enabled:
        return ()
    found: list[Observer] = []
    if device_type == "cuda":
        found.append(_nvtx())
    if profiler._is_profiler_enabled:
        found.append(_profiler_ranges)
    if trace is not None:
        found.append(trace)
    return tuple(found)


def _nvtx() -> NvtxRanges:
    global _nvtx_ranges
    if _nvtx_ranges is None:
        _nvtx_ranges = NvtxRanges()
    return _nvtx_ranges
