"""The CPU with threads and counters that a test controls."""

from __future__ import annotations

from swpipe._engine.waiting import Host
from swpipe.device import CpuDevice


class CpuOn(CpuDevice):
    """The CPU on a host that a test controls."""

    def __init__(self, host: Host) -> None:
        self.host = host
