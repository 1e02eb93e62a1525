"""The emulated link: late handles, idle cores, and no exchange of TorchRec's that avoids it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bench.emulated_link
from bench.emulated_link import EmulatedLink
from tests.support.ranks import Ranks

L_MS = 40.0
BYTES_PER_S = 400.0  # a float a rank: 10 ms


def _exchange(async_op: bool) -> tuple[torch.Tensor, dist.Work | None]:
    rank = dist.get_rank()
    received = torch.zeros(2)
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    return received, dist.all_to_all_single(received, sent, async_op=async_op)


class Clock:
    """A stand-in for the link's ``time`` that advances only when a thread sleeps.

    Attributes:
        slept_ms: Each sleep.
    """

    def __init__(self) -> None:
        self.slept_ms: list[float] = []

    def perf_counter_ns(self) -> int:
        return round(sum(self.slept_ms) * 1e6)

    def sleep(self, seconds: float) -> None:
        self.slept_ms.append(seconds * 1e3)


@contextmanager
def _slow_link() -> Iterator[tuple[EmulatedLink, Clock]]:
    clock = Clock()
    with mock.patch.object(bench.emulated_link, "time", clock), EmulatedLink(L_MS) as link:
        yield link, clock


def _late() -> dict[str, object]:
    with _slow_link() as (link, clock):
        link.recording = True
        received, work = _exchange(async_op=True)
        found = {"work": isinstance(work, dist.Work), "issued": dict(link.issued)}
        clock.sleep(0.25 * L_MS / 1e3)
        found["early"] = work.is_completed()
        work.wait()
        work.wait()
        found["completed"] = work.is_completed()
        found["waited_ms"] = [exchange.waited_ns / 1e6 for exchange in link.exchanges]
        found["handle"] = received.tolist(), clock.slept_ms[:]
        clock.slept_ms.clear()
        received, nothing = _exchange(async_op=False)
        found["call"] = nothing, received.tolist(), clock.slept_ms[:]
        clock.slept_ms.clear()
        (value,) = _exchange(async_op=True)[1].get_future().wait()
    return {**found, "future": (value.tolist(), clock.slept_ms)}


def test_an_exchange_completes_no_sooner_than_it_should(two_ranks: Ranks) -> None:
    """A handle is a Work, is returned at once, and gets what the other rank sent.

    Its wait sleeps for the rest of the time, once: no core is busy meanwhile, and the interpreter
    lock is free. A call without a handle is late itself, and so is a future.
    """
    late = pytest.approx(L_MS)
    for rank, found in enumerate(two_ranks.run(_late)):
        sent = [float(rank), 10.0 + rank]
        assert found == {
            "work": True,
            "issued": {"all_to_all_single": 1},
            "early": False,
            "completed": True,
            "waited_ms": [pytest.approx(0.75 * L_MS)],
            "handle": (sent, [pytest.approx(0.25 * L_MS), pytest.approx(0.75 * L_MS)]),
            "call": (None, sent, [late]),
            "future": (sent, [late]),
        }


def test_the_functions_come_back() -> None:
    """Outside the block, nothing is wrapped."""
    before = dist.all_to_all_single
    with EmulatedLink():
        assert dist.all_to_all_single is not before
    assert dist.all_to_all_single is before


Calls = dict[str, tuple[int, int]]
"""The calls by contender."""


def _seen(model: str, steps: int) -> tuple[Calls, Calls]:
    """Return the collectives of some steps as counted by torch's profiler and by the link."""
    from torch.profiler import ProfilerActivity, profile

    from bench.contenders import CONTENDERS, streams_on_a_cpu
    from bench.contest import runner
    from bench.dlrm import TINY

    issued: Calls = {}
    late: Calls = {}
    with streams_on_a_cpu(), EmulatedLink(1e-3) as link:
        for contender in CONTENDERS[::3]:  # two of TorchRec's classes and three of ours
            made = runner(contender, model, TINY, link)
            for _ in range(6):
                made.pipeline.progress(made.data)
            before = link.issued.copy()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                for _ in range(steps):
                    made.pipeline.progress(made.data)
            calls = Counter(e.name for e in seen.events())
            ours = link.issued - before
            issued[contender.name] = calls["c10d::alltoall_base_"], calls["c10d::allreduce_"]
            late[contender.name] = ours["all_to_all_single"], ours["all_reduce"]
            made.close()
    return issued, late


@pytest.mark.filterwarnings("ignore")
def test_every_exchange_and_reduction_is_late(two_ranks: Ranks) -> None:
    """The collectives that torch sees are those of the link, DDP's all-reduces among them."""
    pytest.importorskip("torchrec")
    for issued, late in two_ranks.run(_seen, "DLRM", 2):
        assert issued == late
        # Ours agree on the end of the data once a pass, before these steps.
        assert {exchanged / 2 for exchanged, _ in issued.values()} == {5}
        assert min(reduced for _, reduced in issued.values()) == 2


def _queued() -> list[float]:
    with _slow_link() as (link, clock):
        link.bytes_per_s = BYTES_PER_S
        works = [_exchange(async_op=True)[1] for _ in range(2)]
        for work in works:
            assert work is not None
            work.wait()
        return clock.slept_ms


def _in_turn() -> list[float]:
    with _slow_link() as (link, clock):
        link.in_turn = True
        works = [_exchange(async_op=True)[1] for _ in range(2)]
        for work in works:
            assert work is not None
            work.wait()
        return clock.slept_ms


def test_collectives_run_one_after_another_if_told(two_ranks: Ranks) -> None:
    """The second one ends one latency after the first."""
    for slept_ms in two_ranks.run(_in_turn):
        assert slept_ms == pytest.approx([L_MS, L_MS])


def test_bytes_queue_up_behind_each_other(two_ranks: Ranks) -> None:
    """Bytes for the other rank take their time; the latency is added once for each."""
    for slept_ms in two_ranks.run(_queued):
        assert slept_ms == pytest.approx([L_MS + 10.0, 10.0])
