"""The CPU with threads and counters of a test's own."""

from __future__ import annotations

from swpipe._engine.waiting import Host
from swpipe.device import CpuDevice


class CpuOn(CpuDevice):
    """The CPU, on a host that a test controls, from which a pipeline takes threads and counters."""

    def __init__(self, host: Host) -> None:
        self.host = host
