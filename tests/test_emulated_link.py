"""The emulated link: late handles, free cores, and no exchange of TorchRec's that goes past it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tests.bench.emulated_link
from tests.bench.emulated_link import EmulatedLink
from tests.support.ranks import Ranks

L_MS = 40.0


def _exchange(async_op: bool) -> tuple[torch.Tensor, dist.Work | None]:
    rank = dist.get_rank()
    received = torch.zeros(2)
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    return received, dist.all_to_all_single(received, sent, async_op=async_op)


class Clock:
    """Stands in for the link's ``time``: it goes on only when somebody sleeps.

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
    with mock.patch.object(tests.bench.emulated_link, "time", clock), EmulatedLink(L_MS) as link:
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
    return {**found, "received": received.tolist(), "slept_ms": clock.slept_ms}


def test_a_handle_completes_no_sooner_than_it_should(two_ranks: Ranks) -> None:
    """It is a Work, issued at once, and has what the other rank sent.

    To wait for it is to sleep for what is left of the time, once: no core is busy meanwhile, and
    the interpreter is free for others.
    """
    for rank, found in enumerate(two_ranks.run(_late)):
        assert found == {
            "work": True,
            "issued": {"all_to_all_single": 1},
            "early": False,
            "completed": True,
            "waited_ms": [pytest.approx(0.75 * L_MS)],
            "received": [float(rank), 10.0 + rank],
            "slept_ms": [pytest.approx(0.25 * L_MS), pytest.approx(0.75 * L_MS)],
        }


def _blocking() -> tuple[bool, list[float], list[float]]:
    with _slow_link() as (_, clock):
        received, work = _exchange(async_op=False)
    return work is None, clock.slept_ms, received.tolist()


def test_a_call_without_a_handle_is_late_itself(two_ranks: Ranks) -> None:
    """It returns what it would have, later."""
    for rank, (nothing, slept_ms, received) in enumerate(two_ranks.run(_blocking)):
        assert nothing
        assert slept_ms == [pytest.approx(L_MS)]
        assert received == [float(rank), 10.0 + rank]


def _futures() -> None:
    with EmulatedLink():
        _, work = _exchange(async_op=True)
        work.wait()
        work.get_future()


def test_a_future_is_refused(two_ranks: Ranks) -> None:
    """It would complete on time."""
    with pytest.raises(NotImplementedError, match="wait"):
        two_ranks.run(_futures)


def test_the_functions_come_back() -> None:
    """Outside the block nothing is wrapped."""
    before = dist.all_to_all_single
    with EmulatedLink():
        assert dist.all_to_all_single is not before
    assert dist.all_to_all_single is before


def _seen(steps: int) -> tuple[Counter[str], Counter[str]]:
    """Collectives of some steps by TorchRec, as torch's profiler and the link count them."""
    from torch.profiler import ProfilerActivity, profile

    from tests.bench.contenders import CONTENDERS
    from tests.bench.dlrm import TINY, dense_optimizer, endless, sharded_dlrm

    found: Counter[str] = Counter()
    with EmulatedLink() as link:
        for contender in CONTENDERS:
            model = sharded_dlrm(TINY)
            pipeline = contender.make(model, dense_optimizer(model))
            data = endless(TINY)
            for _ in range(6):
                pipeline.progress(data)
            before = link.issued.copy()
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                for _ in range(steps):
                    pipeline.progress(data)
            calls = Counter(e.name for e in seen.events() if e.name.startswith("c10d::"))
            ours = link.issued - before
            if ours["all_to_all_single"] != calls["c10d::alltoall_base_"]:
                found[contender.name] += 1
    return found, calls


@pytest.mark.filterwarnings("ignore")
def test_every_exchange_of_every_contender_is_late(two_ranks: Ranks) -> None:
    """All-to-alls that torch sees are those of the link; DDP's reductions alone go past it."""
    for past_the_link, calls in two_ranks.run(_seen, 3):
        assert not past_the_link
        assert calls.keys() == {"c10d::alltoall_base_", "c10d::allreduce_"}
        assert calls["c10d::alltoall_base_"] == 5 * 3
