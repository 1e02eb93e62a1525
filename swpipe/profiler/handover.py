"""How long a thread takes to wake up after the counter it waits for has advanced.

caller   advance(ping, 1) -- wait(pong, 1) ............ | advance(ping, 2) -- wait ...
worker   ...... wakes up ---- advance(pong, 1) -- wait(ping, 2) ....... wakes up ---
|<-------------- round trip: two hand-overs --------------->|
"""

from __future__ import annotations

import time
from contextlib import suppress
from statistics import median

from swpipe._engine.waiting import Cancelled, Host

NUM_WARMUP, NUM_MEASURE = 20, 200


def measure_handover_s(host: Host) -> float:
    """Seconds of one hand-over between two threads: the median over some hundred, in a few ms.

    Uses the counters that the thread groups of a pipeline wait for. No other thread should run.
    """
    ping, pong = host.counter(), host.counter()
    rounds = range(1, NUM_WARMUP + NUM_MEASURE + 1)

    def answer() -> None:
        with suppress(Cancelled):
            for number in rounds:
                ping.wait(number)
                pong.advance(number)

    worker = host.start("swpipe-handover", answer)
    samples_s = []
    try:
        for number in rounds:
            begin_s = time.perf_counter()
            ping.advance(number)
            pong.wait(number)
            samples_s.append((time.perf_counter() - begin_s) / 2)
    finally:
        ping.cancel()
        worker.join()
    return median(samples_s[NUM_WARMUP:])
