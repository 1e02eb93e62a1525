"""Ports for the stores of ranks."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 12_000, 20_000
"""Ports below those that the system assigns, which other tests use all the time."""

_next = itertools.count()


def free_port() -> int:
    """Return a port without a listener; another one each time, and in each process."""
    while True:
        port = _FIRST + (61 * os.getpid() + next(_next)) % _COUNT
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
        return port
